"""Identifies the process at the other end of a Unix socket, as the kernel reports it."""

from __future__ import annotations

import os
import socket
import struct
from typing import Optional

from worker_entry.protocol.frozen import dataclass
from worker_entry.system import kernel


@dataclass(frozen=True)
class Peer:
    """A process and its user. `pid` is 0 if the process is in a PID namespace that cannot be seen from here."""

    pid: int
    uid: int


def find_peer(connection: socket.socket) -> Optional[Peer]:
    """The process that has connected, or has made the socket that we connected to; None outside Linux."""
    if not kernel.LINUX:
        return None
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid)


def is_ours(connection: socket.socket, pid: Optional[int] = None) -> bool:
    """Whether the peer runs as this user or root, and is `pid` if given; outside Linux, the folder must suffice."""
    peer = find_peer(connection)
    return peer is None or (peer.uid in (os.geteuid(), 0) and pid in (None, peer.pid))
