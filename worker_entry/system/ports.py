"""Holds ports, so that none is lost between its choice and the moment when TensorFlow binds it.

A port is held by a socket that is bound but does not listen. It is bound *without* SO_REUSEPORT, so that no other
launcher can hold it, and gets the option afterwards, so that a server with the option (gRPC under
TF_GRPC_REUSE_PORT=true) can still bind it. Linux and macOS check the existing sockets' option when a new one is bound.

For a program that uses SO_REUSEADDR instead, as PyTorch does, the held socket gets that option. Any other program with
SO_REUSEADDR could then take the port, so it is only protected from other launchers and from ports chosen at random.
"""

from __future__ import annotations

import errno
import socket
from typing import Optional

from worker_entry.protocol.values import Problem, TaskRequest
from worker_entry.system import kernel

LAST_PORT = 65535
POLL_S = 0.04


class HeldPorts:
    """The ports of one attempt; `release` gives them back."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.forming: set[str] = set()
        """The tasks that have not opened their ports yet."""
        self._polled = 0.0
        self._sockets: list[socket.socket] = []

    def hold(self, requests: list[TaskRequest], first: int, last: int) -> list[Problem]:
        """Holds a port for every request; returns the problems of those for which it could not."""
        problems = []
        # Explicit ports first, so that no automatic choice takes them.
        for request in requests:
            if request.port:
                problem = self._hold_explicit(request)
                problems += [problem] if problem else []
        candidates = iter(range(first, last + 1))
        for request in requests:
            if request.port == 0 and not any(self._try(request, port) is None for port in candidates):
                problems.append(
                    Problem(
                        "no-free-port",
                        f"no free port is left in {first}-{last}",
                        "widen `ports:` in the spec",
                        request.task,
                    )
                )
        return problems

    def newly_open(self, now: float) -> list[str]:
        """The tasks that have opened their ports since the last call; checks at most 25 times a second."""
        if now < self._polled + POLL_S:
            return []
        self._polled = now
        found = [task for task in self.forming if is_open(self.numbers[task])]
        self.forming.difference_update(found)
        return found

    def release(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()
        self.numbers.clear()
        self.forming.clear()

    def _hold_explicit(self, request: TaskRequest) -> Optional[Problem]:
        task, port = request.task, request.port
        error = self._try(request, port)
        if error is not None and error.errno == errno.EADDRINUSE and kernel.only_closing(port):
            # Closing connections of a run that has just ended block a port for a minute.
            error = self._try(request, port, reuse=True)
        if error is None:
            return None
        if error.errno == errno.EADDRINUSE:
            holder = kernel.port_holder(port) or "another process (of another user, or one that does not listen yet)"
            return Problem("port-taken", f"port {port} is held by {holder}", "stop it or choose another port", task)
        return Problem("port-refused", f"port {port} cannot be bound: {error.strerror}", "choose another port", task)

    def _try(self, request: TaskRequest, port: int, *, reuse: bool = False) -> Optional[OSError]:
        held = _socket()
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            held.bind(("", port))
        except OSError as error:
            held.close()
            return error
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, request.reuse_address)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, not request.reuse_address)
        self._sockets.append(held)
        self.numbers[request.task] = port
        return None


def is_port(number: int) -> bool:
    return 0 < number <= LAST_PORT


def is_open(port: int) -> bool:
    """Whether a process listens on this port of the machine."""
    with _socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _socket() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
