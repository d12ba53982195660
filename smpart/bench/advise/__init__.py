"""``smpart advise``: whether a split pays for a model, GPU, load and objectives, which splits, and how much."""
