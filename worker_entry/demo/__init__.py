"""The built-in demo: a small Keras program for several workers, and its data."""
