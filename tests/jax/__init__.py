"""Training with Keras on JAX, on several processes of the CPU."""
