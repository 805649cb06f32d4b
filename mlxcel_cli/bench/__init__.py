"""What `mlxcel bench` measures: how fast a model is in this process, and how a server bears load."""
