"""Other versions of Python, TensorFlow and Keras, each in an environment of its own; only with `pytest --versions`."""
