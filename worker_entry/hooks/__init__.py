"""What is done to TensorFlow and JAX from outside, at the moment when a program imports them."""
