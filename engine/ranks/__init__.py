"""One model over several processes that MLX connects: rank 0 decides, the others run the same forwards."""
