"""Serving over several processes: a router, nodes that compute prompts, and nodes that go on from them."""
