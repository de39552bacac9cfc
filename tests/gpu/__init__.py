"""Runs on an NVIDIA GPU: `pytest tests/gpu` or, where there is one, `pytest --all`."""
