"""The built-in demo: a small Keras program for several workers, with its data."""
