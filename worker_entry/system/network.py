"""The network in which sockets are made: a socket stays in the network of the process that has made it."""

from __future__ import annotations

import socket
from typing import Optional

from worker_entry.protocol.frozen import dataclass
from worker_entry.system import kernel


@dataclass(frozen=True)
class PortUse:
    """Who has a port: the process, if it can be found; `closing`: only connections that belong to no process."""

    holder: Optional[str]
    closing: bool


class Network:
    """This process's own."""

    def make_socket(self, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """A new socket.

        Raises:
            OSError: the system has none of this family, or no more at all.
        """
        return socket.socket(family, kind, protocol)

    def look_up(self, port: int) -> PortUse:
        """Who has this port, as far as it can be found."""
        return PortUse(kernel.port_holder(port), kernel.only_closing(port))


HERE = Network()
