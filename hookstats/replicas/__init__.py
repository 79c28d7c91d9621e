"""Whether ranks that should hold the same tensors do."""
