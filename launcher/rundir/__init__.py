"""A run's folder: what its controller writes, and all other commands read."""
