"""What Keras lacks on JAX, where several processes train a model together under `keras.distribution`."""
