"""Measures the connection between two nodes: one dials a port that the other holds for a task.

Each measurement has a connection of its own. The dialling side always closes first, and discards what is still in
flight, so that it reaches neither the next measurement nor the task.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator

from worker_entry.agent.checks.calls import ECHO, SINK, SOURCE, introduce, read_line
from worker_entry.protocol.speed import LinkMeasured, MeasureLink

ANSWER_S = 5.0
"""How long the other side may be silent."""
WHOLE_S = 20
"""How long a process may take for one measurement."""
PINGS, PINGS_S = 50, 0.25
"""The number of one-byte round trips, and their time limit."""
WARM_UP_S, WINDOW_S, WINDOWS = 0.05, 0.06, 2
"""Throughput is that of the best window: other programs rarely disturb a short one."""
_PIECE = 1 << 18
_RESET = struct.pack("ii", 1, 0)


def measure_link(order: MeasureLink) -> LinkMeasured:
    """Measures the link; called in a child process, because it blocks."""
    signal.alarm(WHOLE_S)
    try:
        latency_s = _ping(order)
        with _connected(order, SINK) as connection:
            there = _send_until_answer(connection)
        with _connected(order, SOURCE) as connection:
            back = _receive(connection)
    except (OSError, ValueError, UnicodeError) as error:
        return LinkMeasured(problem=getattr(error, "strerror", None) or str(error) or "no answer")
    return LinkMeasured(there, back, latency_s)


def serve_link(connection: socket.socket, mode: str) -> None:
    """Serves another node's measurement; called in a child process, because it blocks."""
    signal.alarm(WHOLE_S)
    connection.setblocking(True)
    connection.settimeout(ANSWER_S)
    with connection, contextlib.suppress(OSError):  # the other side is gone
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"\n")
        if mode == ECHO:
            while data := connection.recv(64):
                connection.sendall(data)
        elif mode == SINK:
            connection.sendall(json.dumps(_receive(connection)).encode() + b"\n")
            while connection.recv(_PIECE):
                pass
        elif mode == SOURCE:
            piece = bytes(_PIECE)
            while True:
                connection.sendall(piece)


@contextlib.contextmanager
def _connected(order: MeasureLink, mode: str) -> Iterator[socket.socket]:
    """A connection whose other end is served by an agent."""
    target = order.target
    with socket.create_connection((target.host.strip("[]"), target.port), timeout=ANSWER_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if not introduce(connection, order.nonce, target.task, mode):
            raise ValueError("something else answers there")
        if read_line(connection) != b"\n":
            raise ValueError("the other side does not measure")
        yield connection


def _ping(order: MeasureLink) -> float:
    with _connected(order, ECHO) as connection:
        best, began = float("inf"), time.monotonic()
        for number in range(PINGS):
            started = time.perf_counter()
            connection.sendall(b".")
            if not connection.recv(1):
                raise ValueError("the other side has closed the connection")
            best = min(best, time.perf_counter() - started)
            if number > 1 and time.monotonic() - began > PINGS_S:
                break
    return best


def _send_until_answer(connection: socket.socket) -> float:
    """Sends until the other side has measured; returns its MB/s."""
    connection.setblocking(False)
    piece, deadline = bytes(_PIECE), time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        readable, _, _ = select.select([connection], [connection], [], ANSWER_S)
        if readable:
            connection.settimeout(ANSWER_S)
            return float(json.loads(read_line(connection) or b"null") or 0.0)
        with contextlib.suppress(BlockingIOError):
            connection.send(piece)
    raise TimeoutError("no answer")


def _receive(connection: socket.socket) -> float:
    """The MB/s of the best window."""
    buffer = bytearray(1 << 20)
    best, received, windows, everything = 0.0, 0, -1, 0  # the first window is the warm-up
    began = since = time.perf_counter()
    while windows < WINDOWS:
        length = connection.recv_into(buffer)
        now = time.perf_counter()
        received += length
        everything += length
        if not length:
            break
        if now - since >= (WINDOW_S if windows >= 0 else WARM_UP_S):
            if windows >= 0:
                best = max(best, received / (now - since))
            since, received, windows = now, 0, windows + 1
    return (best or everything / max(time.perf_counter() - began, 1e-9)) / 1e6
