"""Loopback addresses and ports that no other test process of this machine uses, of this run or of another one."""

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
    """Ports of this process, below those that distlaunch and the kernel choose from."""
    first = 12000 + PORTS * _claim()[0]
    return range(first, first + PORTS)


@functools.cache
def _claim() -> tuple[int, socket.socket | None]:
    """The process' number among all test processes, and the name that reserves it.

    An abstract name belongs to one network namespace, as loopback addresses do, and ends with its process.
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
