"""The GPUs of the node: their readings, and those that are kept for a run."""
