"""Text on both sides of the tokens: the chat render before, the detokenizer after."""
