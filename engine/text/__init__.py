"""Text on both sides of the tokens: the chat render before; after, detokenizer, filter and tool calls."""
