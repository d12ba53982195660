"""What the CUDA backends are made of."""
