"""Models whose tokens see all others of their text: run whole, and giving hidden states alone."""
