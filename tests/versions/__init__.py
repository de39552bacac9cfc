"""Other versions of Python and of the libraries that train, in environments of their own, with `pytest --versions`."""
