"""Training with real TensorFlow."""
