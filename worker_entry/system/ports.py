"""Holds ports, so that no port is lost between its choice and the moment when TensorFlow binds it.

A port is held by a socket that is bound *without* SO_REUSEPORT, so that no other launcher can hold the port. The socket
gets the option afterwards, so that a server with the option (gRPC under TF_GRPC_REUSE_PORT=true) can still bind the
port. Linux and macOS check the option of the existing sockets when a new socket is bound.

On Linux, the holding socket also listens, and a filter in the kernel decides for each connection whether the server
gets it; see `agent.port_guards`. Sockets of two families share no filter, so the socket has the family that gRPC will
use: IPv6, which also accepts IPv4, or IPv4 where the network has no IPv6, as in many pods.

For a program that uses SO_REUSEADDR instead, as PyTorch does, the holding socket gets that option, and does not listen.
Any other program with SO_REUSEADDR can then take the port, so the port is protected only from other launchers and from
random choices of free ports.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Optional

from worker_entry.protocol.values import Problem, TaskRequest
from worker_entry.system import kernel
from worker_entry.system.address_filter import compile_filter
from worker_entry.system.network import HERE, Network

LAST_PORT = 65535
POLL_S = 0.04
UNKNOWN = "another process (of another user, or one that does not listen yet)"
BACKLOG = 128
NOBODY = compile_filter(())
"""A filter that accepts no address."""
_ATTACH_FILTER = 51
"""SO_ATTACH_REUSEPORT_CBPF of Linux 4.5 and later; Python has no name for it."""


class HeldPorts:
    """The held ports of one attempt; `release` frees them."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.forming: set[str] = set()
        """The tasks that have not opened their ports yet."""
        self.guarded: dict[str, socket.socket] = {}
        """The listening sockets of the ports that have a filter."""
        self.unguarded: dict[str, str] = {}
        """Why the other ports of the cluster have no filter."""
        self.probe: Callable[[str, int], Optional[bool]] = lambda _task, _port: None
        """Whether the task of a guarded port listens; None for any other port."""
        self.network = HERE
        """The network in which the ports are held; the tasks may listen in another network."""
        self.shown_network = HERE
        """The network in which TensorBoard's port is held and users open it."""
        self._guards = True
        self._polled = 0.0
        self._sockets: list[socket.socket] = []

    def hold(self, requests: list[TaskRequest], first: int, last: int, *, guard: bool = True) -> list[Problem]:
        """Holds a port for every request; returns the problems of the requests that failed.

        `guard`: whether the ports get a filter where possible.
        """
        self._guards = guard
        problems = []
        # Explicit ports come first, so that no automatic choice takes them.
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
        found = [task for task in self.forming if self._is_open(task, self.numbers[task])]
        self.forming.difference_update(found)
        return found

    def _is_open(self, task: str, port: int) -> bool:
        joined = self.probe(task, port)
        return is_open(port) if joined is None else joined

    def release(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets.clear()
        self.guarded.clear()
        self.unguarded.clear()
        self.numbers.clear()
        self.forming.clear()

    def _hold_explicit(self, request: TaskRequest) -> Optional[Problem]:
        task, port = request.task, request.port
        error = self._try(request, port)
        if error is not None and error.errno == errno.EADDRINUSE and self.network.look_up(port).closing:
            # The closing connections of a run that has just ended block a port for a minute.
            error = self._try(request, port, reuse=True)
        if error is None:
            return None
        if error.errno == errno.EADDRINUSE:
            holder = self.network.look_up(port).holder or UNKNOWN
            return Problem("port-taken", f"port {port} is held by {holder}", "stop it or choose another port", task)
        return Problem("port-refused", f"port {port} cannot be bound: {error.strerror}", "choose another port", task)

    def _try(self, request: TaskRequest, port: int, *, reuse: bool = False) -> Optional[OSError]:
        try:
            if is_auxiliary(request.task):
                held = self.shown_network.make_socket(socket.AF_INET)
            elif request.reuse_address:
                held = self.network.make_socket(socket.AF_INET)
            else:
                held = dual_socket(self.network)
        except OSError as error:
            return error
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            held.bind(("", port))
        except OSError as error:
            held.close()
            return error
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, not request.reuse_address)
        self._sockets.append(held)
        self.numbers[request.task] = port
        problem = "PyTorch does not share it" if request.reuse_address else "guard: off in the spec"
        if self._guards and not request.reuse_address:
            problem = _guard(held)  # before the option changes below: `listen` checks the port again
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, request.reuse_address)
        if is_auxiliary(request.task):
            return None
        if problem:
            self.unguarded[request.task] = problem
        else:
            self.guarded[request.task] = held
        return None


def render_unguarded(reasons: Mapping[str, str]) -> list[Problem]:
    """Returns a problem for each task whose port others can reach, with the reason."""
    hint = "remove `guard: required` from the spec to start anyway"
    return [
        Problem("port-unguarded", f"the port of {task} cannot be guarded: {why}", hint, task)
        for task, why in reasons.items()
    ]


def _guard(held: socket.socket) -> str:
    """Makes the socket listen behind a filter that accepts no address; returns why it cannot, or an empty text."""
    try:
        attach_filter(held, NOBODY)
    except (OSError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return f"this system has no port filters: {why}"
    held.listen(BACKLOG)
    held.setblocking(False)
    return ""


def attach_filter(listener: socket.socket, program: bytes) -> None:
    """Makes only connections that the program accepts go to the server that shares the listener's port.

    All other connections go to the listener itself, as do all connections while no server shares the port. `program`:
    see `compile_filter`.

    Raises:
        OSError: this system has no port filters.
    """
    if not kernel.LINUX:
        raise OSError(errno.ENOPROTOOPT, "not a Linux system")
    code = ctypes.create_string_buffer(program, len(program))
    fields = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, fields)


def is_auxiliary(task: str) -> bool:
    """Whether the task is TensorBoard, which is outside the cluster and listens only on the loopback address."""
    return task.startswith("tensorboard:")


def is_port(number: int) -> bool:
    return 0 < number <= LAST_PORT


def is_open(port: int) -> bool:
    """Whether a process listens on this port of the machine."""
    with HERE.make_socket(socket.AF_INET) as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def has_ipv4_listener(port: int) -> bool:
    """Whether an IPv4-only socket listens on this port."""
    try:
        with open("/proc/net/tcp", encoding="ascii") as stream:
            rows = [line.split() for line in stream]
    except OSError:
        return False
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows[1:])


def dual_socket(network: Network) -> socket.socket:
    """Returns a socket for IPv6 and IPv4, or for IPv4 alone where ::1 cannot be bound, as gRPC does."""
    try:
        with network.make_socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        both = network.make_socket(socket.AF_INET6)
    except OSError:
        return network.make_socket(socket.AF_INET)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return both
