"""Which TCP connections the processes of this machine have, from /proc; Linux only."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Optional

from worker_entry.protocol.frozen import dataclass
from worker_entry.system.process_use import read_whole

_OPEN = (b"01", b"02")
"""The states of a connection on which something may arrive: established, and being established."""
_MAPPED = b"0000000000000000FFFF0000"
"""How the kernel writes an IPv4 address on an IPv6 socket begins."""
_SOCKET = re.compile(r"socket:\[(\d+)\]")
End = tuple[bytes, int]
"""An address, as the kernel writes it, and a port."""


@dataclass(frozen=True)
class Connection:
    """A connection; `is_quiet`: all sent bytes have been acknowledged, and all received ones read."""

    local: End
    remote: End
    is_quiet: bool


def find_sockets(files: Iterable[str]) -> set[int]:
    """The sockets among open files, which are named as in `kernel.open_files`."""
    return {int(found[1]) for found in map(_SOCKET.fullmatch, files) if found is not None}


def read_connections(pid: int) -> Optional[dict[int, Connection]]:
    """The connections in a process's network, by the number of the socket; None if they are unknown."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = read_whole(f"/proc/{pid}/net/{name}").splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        except OSError:
            return None
        for line in lines:
            words = line.split()
            if words[3] in _OPEN:
                is_quiet = set(words[4]) <= set(b"0:")
                found[int(words[9])] = Connection(_parse_end(words[1]), _parse_end(words[2]), is_quiet)
    return found


def _parse_end(text: bytes) -> End:
    address, _, port = text.partition(b":")
    return address[len(_MAPPED) :] if address.startswith(_MAPPED) else address, int(port, 16)


def leads_outside(
    own: Collection[int], tasks: Collection[int], connections: Mapping[int, Connection], ports: Collection[int]
) -> bool:
    """Whether something else than silent tasks may send over one of these connections.

    Args:
        own: the sockets of a task.
        tasks: the sockets of all tasks on this machine.
        connections: all connections of this machine.
        ports: the ports of all tasks of the cluster.
    """
    ends = {(connection.local, connection.remote) for number, connection in connections.items() if number in tasks}
    for connection in (connections[number] for number in own if number in connections):
        is_inside = (connection.remote, connection.local) in ends or not {
            connection.local[1],
            connection.remote[1],
        }.isdisjoint(ports)
        if not is_inside or not connection.is_quiet:
            return True
    return False
