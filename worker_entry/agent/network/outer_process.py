"""The process that an agent leaves behind in the machine's network: it makes sockets, and does checks in children.

It exits when the connection on its stdin ends. A request is one JSON message, with descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
from collections.abc import Sequence

from worker_entry.agent.helpers.child_work import fork_work
from worker_entry.agent.helpers.works import perform
from worker_entry.agent.network.outer import MESSAGE_LIMIT
from worker_entry.protocol.frozen import asdict
from worker_entry.system.network import HERE

_DESCRIPTORS = 2


def serve() -> None:
    """Serves all connections until the first one ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    first = socket.socket(fileno=os.dup(0))
    selector = selectors.DefaultSelector()
    selector.register(first, selectors.EVENT_READ, first)
    while True:
        for key, _ in selector.select():
            connection: socket.socket = key.data
            if _answer(connection, selector):
                continue
            if connection is first:
                return
            selector.unregister(connection)
            connection.close()


def _answer(connection: socket.socket, selector: selectors.BaseSelector) -> bool:
    """Answers one request; returns whether there was one."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_LIMIT, _DESCRIPTORS)
    except OSError:
        data, descriptors = b"", []
    if not data:
        return False
    request = json.loads(data)
    if "socket" in request:
        _send_socket(connection, request["socket"])
    elif "port" in request:
        with contextlib.suppress(OSError):
            connection.send(json.dumps(asdict(HERE.look_up(request["port"]))).encode())
    elif "connection" in request:
        new = socket.socket(fileno=descriptors[0])
        selector.register(new, selectors.EVENT_READ, new)
    else:
        _begin(request["work"], *descriptors)
    return True


def _send_socket(connection: socket.socket, kind: Sequence[int]) -> None:
    try:
        with socket.socket(*kind) as made:
            socket.send_fds(connection, [b"{}"], [made.fileno()])
    except OSError as error:
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"error": error.errno or errno.EIO}).encode())


def _begin(work: str, reading: int, writing: int) -> None:
    def answer() -> bytes:
        with open(reading, "rb") as stream:
            return perform(work, stream.read())

    fork_work(answer, writing, reading)
    os.close(reading)
    os.close(writing)
