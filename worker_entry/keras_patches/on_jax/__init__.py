"""What Keras lacks on JAX, where several processes train a model together under a distribution of Keras's."""
