"""Loopback addresses and ports that no other test process on this machine uses, in this or another test run."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys

FIRST = 64
PROCESSES = 100
PORTS = 80


def address(subnet: int, host: int) -> str:
    """An address of this process: `127.P.subnet.host`, where P differs from that of all other test processes."""
    return f"127.{FIRST + _claim()[0]}.{subnet}.{host}"


def ports() -> range:
    """Ports of this process, below the ranges from which distlaunch and the kernel choose."""
    first = 12000 + PORTS * _claim()[0]
    return range(first, first + PORTS)


@functools.cache
def _claim() -> tuple[int, socket.socket | None]:
    """The number of this process among all test processes, and the socket whose name reserves it.

    An abstract socket name belongs to one network namespace, as loopback addresses do, and ends with its process.
    """
    if sys.platform != "linux":
        return 0, None
    for number in range(PROCESSES):
        lock = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            lock.bind(f"\0distlaunch-tests-{number}")
            return number, lock
        lock.close()
    raise RuntimeError("too many test processes on this machine")
