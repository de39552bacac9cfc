"""Checks that nodes reach each other at the exact addresses in TF_CONFIG, before TensorFlow uses them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from typing import Any

from worker_entry.agent.checks.answering import Answering
from worker_entry.agent.checks.calls import introduce
from worker_entry.agent.checks.inspection import mark_path
from worker_entry.protocol.messages import Dialled
from worker_entry.protocol.orders import Dial
from worker_entry.protocol.values import DialResult, Target
from worker_entry.system.callers import Listener
from worker_entry.system.network import Network
from worker_entry.system.ports import dual_socket

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
    """Answers connections to held ports that have no guard, so that other nodes can check that they reach them.

    `serve` takes over the connection of a caller that measures the link, in the mode that the caller asks for.
    """

    def __init__(self, selector: selectors.BaseSelector, serve: Callable[[socket.socket, str], None]) -> None:
        self._selector = selector
        self._answering = Answering(selector, serve)
        self._listeners: list[Listener] = []

    def open(self, ports: Mapping[str, int], nonce: str, network: Network) -> None:
        """Listens on the tasks' ports in the network that holds them.

        Raises:
            OSError: a port cannot be listened on.
        """
        for task, port in ports.items():
            listener = Listener(listen(port, network))
            self._listeners.append(listener)
            greet = functools.partial(self._greet, listener, nonce, task)
            self._selector.register(listener.socket, selectors.EVENT_READ, greet)

    def _greet(self, listener: Listener, nonce: str, task: str) -> None:
        if (accepted := listener.accept()) is not None:
            caller, peer = accepted
            self._answering.take(caller, str(peer[0]), nonce, task)

    def poll(self, now: float) -> None:
        """Drops callers that are late; `now`: monotonic seconds."""
        self._answering.poll(now)

    def close(self) -> None:
        self._answering.end()
        for listener in self._listeners:
            self._selector.unregister(listener.socket)
            listener.close()
        self._listeners.clear()


def listen(port: int, network: Network) -> socket.socket:
    """A listener on a port that another socket holds; for IPv4 and IPv6, like TensorFlow's."""
    listener = dual_socket(network)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port is held with one of these two options
    try:
        listener.bind(("", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def dial(order: Dial) -> Dialled:
    """Dials all targets at once, and looks for the marks. It uses threads, so it must not run in the agent itself."""
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
    except (socket.gaierror, UnicodeError):
        return DialResult(target, resolved, "unknown-name")
    # Like gRPC, tries one address after another; the failure of the first is the most telling.
    failure = ""
    for entry in found:
        problem, source = _try(target, entry, nonce)
        if not problem:
            return DialResult(target, resolved, "", source)
        failure = failure or problem
    return DialResult(target, resolved, failure)


def _try(target: Target, entry: AddressInfo, nonce: str) -> tuple[str, str]:
    """Returns why an address of the target does not answer as expected (empty if it does), and the dialling address."""
    is_agent = False
    try:
        with socket.socket(entry[0], socket.SOCK_STREAM) as caller:
            caller.settimeout(DIAL_S)
            caller.connect(entry[4])
            source = str(caller.getsockname()[0])
            with contextlib.suppress(OSError):
                is_agent = introduce(caller, nonce, target.task)
    except TimeoutError:
        return "timed-out", ""
    except OSError as error:
        return _FAILURES.get(error.errno or 0, error.strerror or str(error)), ""
    return ("", source) if is_agent else ("other", "")
