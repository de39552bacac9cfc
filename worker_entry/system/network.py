"""The network in which sockets are made: a socket stays in the network of the process that made it."""

from __future__ import annotations

import socket
from typing import Optional

from worker_entry.protocol.frozen import dataclass
from worker_entry.system import kernel


@dataclass(frozen=True)
class PortUse:
    """The holder of a port, if it can be found; `closing`: only closing connections of no process use the port."""

    holder: Optional[str]
    closing: bool


class Network:
    """This process's own network."""

    def make_socket(self, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """Returns a new socket.

        Raises:
            OSError: the system does not support the family, or is out of sockets.
        """
        return socket.socket(family, kind, protocol)

    def look_up(self, port: int) -> PortUse:
        """Returns the users of this port, as far as they can be found."""
        return PortUse(kernel.port_holder(port), kernel.only_closing(port))


HERE = Network()
