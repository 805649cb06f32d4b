"""What other programs need to be told to use a running server."""
