"""The network in which sockets are made: a socket stays in the network of the process that has made it."""

from __future__ import annotations

import socket


class Network:
    """This process's own."""

    tables = "/proc/net"
    """Where the kernel tells which connections there are; Linux only."""

    def socket(self, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """A new socket.

        Raises:
            OSError: the system has none of this family, or no more at all.
        """
        return socket.socket(family, kind, protocol)


HERE = Network()
