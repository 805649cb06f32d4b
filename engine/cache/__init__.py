"""What a row keeps between its tokens, and the attention that reads it."""
