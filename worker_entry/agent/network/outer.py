"""The network that an agent has left: a process that stays there makes its sockets."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Optional

from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.values import Problem
from worker_entry.system import processes
from worker_entry.system.network import Network, PortUse

ANSWER_S = 10.0
"""How long a new socket may take; the agent does nothing else meanwhile."""
MESSAGE_LIMIT = 4096


class OuterNetwork(Network):
    """Made before the agent enters its own network. `pids` contains the process, so that no stop ends it.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.settimeout(ANSWER_S)
        command = [sys.executable, PACKAGE, "outside"]
        with theirs, open(os.devnull, "wb") as nowhere:
            pid = processes.spawn(
                command, env=dict(os.environ), cwd=os.sep, output=nowhere.fileno(), stdin=theirs.fileno()
            )
        self.pids.add(pid)

    def make_socket(self, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        return ask_for_socket(self._asking, family, kind, protocol)

    def look_up(self, port: int) -> PortUse:
        try:
            self._asking.send(json.dumps({"port": port}).encode())
            return PortUse(**json.loads(self._asking.recv(MESSAGE_LIMIT)))
        except (OSError, ValueError):  # the process is gone
            return PortUse(None, closing=False)

    def connect(self) -> socket.socket:
        """A connection over which another process can `ask_for_socket`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._asking, [json.dumps({"connection": True}).encode()], [theirs.fileno()])
        return ours

    def begin_work(self, work: str, data: bytes, writer: int) -> None:
        """Starts a child in that network; it writes the answer to `writer`; see `helpers.works`."""
        begin_work(self._asking, work, data, writer)

    def end(self) -> None:
        """Kills the process and waits until it is gone."""
        self._asking.close()
        processes.end_children(self.pids)


def begin_work(asking: socket.socket, work: str, data: bytes, writer: int) -> None:
    """Has the work done in the outer network, over a connection to the process there."""
    reading, writing = os.pipe()
    with open(writing, "wb") as stream:
        try:
            socket.send_fds(asking, [json.dumps({"work": work}).encode()], [reading, writer])
        finally:
            os.close(reading)
        stream.write(data)


def ask_for_socket(asking: socket.socket, family: int, kind: int, protocol: int = 0) -> socket.socket:
    """A new socket of the outer network, over a connection to the process there.

    Raises:
        OSError: the system does not support this family, or the process is gone.
    """
    asking.send(json.dumps({"socket": [family, kind, protocol]}).encode())
    data, descriptors, _, _ = socket.recv_fds(asking, MESSAGE_LIMIT, 1)
    if not descriptors:
        number = json.loads(data)["error"] if data else errno.EPIPE
        raise OSError(number, os.strerror(number))
    return socket.socket(family, kind, protocol, fileno=descriptors[0])


def leave_network(note: Callable[[OuterNetwork], None]) -> Optional[Problem]:
    """Passes the current network to `note` and enters a new one of this process's own; returns the problem, if any."""
    from worker_entry.system.isolation import enter_own_network

    try:
        note(OuterNetwork())
        enter_own_network()
    except OSError as error:
        hint = "the system forbids such namespaces (see `sysctl user.max_user_namespaces` and its AppArmor rules)"
        return Problem("no-isolation", f"no network of its own: {error.strerror}", hint)
    return None
