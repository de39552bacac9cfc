"""Hooks that patch or watch TensorFlow, JAX and PyTorch when a program imports them."""
