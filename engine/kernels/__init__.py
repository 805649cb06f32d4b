"""Which kernels run here."""
