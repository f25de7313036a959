"""Single-controller reinforcement-learning post-training on Dask distributed."""
