"""Whether nodes reach each other on the very addresses that TF_CONFIG will have, tried before TensorFlow does."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Mapping
from typing import Any

from worker_entry.agent.checks.inspection import mark_path
from worker_entry.protocol.messages import Dialled
from worker_entry.protocol.orders import Dial
from worker_entry.protocol.values import DialResult, Target

DIAL_S = 5.0
"""How long a dialled address may take to answer."""
DIALS_AT_ONCE = 64

AddressInfo = tuple[Any, ...]
"""An entry of getaddrinfo: family, type, protocol, canonical name, address."""

_FAILURES = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed-out",
    errno.EHOSTUNREACH: "no-route",
    errno.ENETUNREACH: "no-route",
}


class PortResponders:
    """Sockets that answer on held ports, so that others can tell whether they reach them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._open: set[socket.socket] = set()

    def open(self, ports: Mapping[str, int], nonce: str) -> None:
        """Answers on the ports of the tasks; raises OSError if one cannot be listened on."""
        for task, port in ports.items():
            listener = listen(port)
            greeting = _greeting(nonce, task)
            self._add(listener, lambda listener=listener, greeting=greeting: self._greet(listener, greeting))

    def _greet(self, listener: socket.socket, greeting: bytes) -> None:
        with contextlib.suppress(OSError):  # who has dialled is gone again
            caller, _ = listener.accept()
            caller.setblocking(False)
            # The caller has to close first: its end of the connection, not our port, is then kept by the kernel.
            self._add(caller, lambda: self._forget(caller))
            caller.send(greeting)

    def _add(self, new: socket.socket, callback: object) -> None:
        new.setblocking(False)
        self._open.add(new)
        self._selector.register(new, selectors.EVENT_READ, callback)

    def _forget(self, one: socket.socket) -> None:
        self._open.discard(one)
        self._selector.unregister(one)
        one.close()

    def close(self) -> None:
        for one in list(self._open):
            self._forget(one)


def listen(port: int) -> socket.socket:
    """A listener beside whoever holds the port; for both families, as TensorFlow's is."""
    try:
        listener = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        place: tuple[str, int] = ("::", port)
    except OSError:  # a kernel without IPv6
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        place = ("0.0.0.0", port)  # noqa: S104 - as TensorFlow's own server will be
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # by whichever of the two the port is lent
    try:
        listener.bind(place)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def dial(order: Dial) -> Dialled:
    """Dials all targets at once, and looks for the marks. Uses threads: not for the agent's own process."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=DIALS_AT_ONCE) as pool:
        results = list(pool.map(lambda target: _dial(target, order.nonce), order.targets))
    marks = [mark for mark in order.marks if os.path.exists(mark_path(order.shared, mark))]
    return Dialled(results, marks)


def _dial(target: Target, nonce: str) -> DialResult:
    resolved: list[str] = []
    try:
        found = socket.getaddrinfo(target.host.strip("[]"), target.port, type=socket.SOCK_STREAM)
        resolved = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        # As gRPC does, one address after the other; that of the first says most.
        tries = (_try(target, entry, nonce) for entry in found)
        failure = next(tries)
        failure = "" if failure and "" in tries else failure
    except (socket.gaierror, UnicodeError):
        failure = "unknown-name"
    return DialResult(target, resolved, failure)


def _try(target: Target, entry: AddressInfo, nonce: str) -> str:
    """Why one address of the target does not answer as it should; empty if it does."""
    greeting, heard = _greeting(nonce, target.task), b""
    try:
        with socket.socket(entry[0], socket.SOCK_STREAM) as caller:
            caller.settimeout(DIAL_S)
            caller.connect(entry[4])
            with contextlib.suppress(OSError):
                while len(heard) < len(greeting) and (piece := caller.recv(len(greeting) - len(heard))):
                    heard += piece
    except TimeoutError:
        return "timed-out"
    except OSError as error:
        return _FAILURES.get(error.errno or 0, error.strerror or str(error))
    return "" if heard == greeting else "other"


def _greeting(nonce: str, task: str) -> bytes:
    return f"distlaunch {nonce} {task}\n".encode()
