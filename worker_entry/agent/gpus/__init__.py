"""The GPUs of the node: their readings, and their reservation for a run."""
