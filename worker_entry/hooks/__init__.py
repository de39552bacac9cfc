"""Hooks that patch or watch TensorFlow and JAX when a program imports them."""
