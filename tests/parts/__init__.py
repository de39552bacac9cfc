"""One part of the product with real files, sockets, threads or a terminal."""
