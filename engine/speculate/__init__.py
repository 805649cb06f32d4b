"""Several tokens a step, verified: who proposes them, and when that pays."""
