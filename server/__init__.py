"""The HTTP face of the engine: an ASGI application; it knows no terminal and no MLX."""
