"""Extends the TCP time-outs of tasks, so that a short network outage does not end training.

gRPC makes the kernel reset a connection on which nothing was acknowledged for 20 s, and TensorFlow has no option to
change that. But the agent is the parent of its tasks, so the kernel lets the agent access their sockets (Linux 5.6).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterable

from worker_entry.system import kernel

EVERY_S = 5.0
"""How often to look for new connections; well below a new connection's 20 s."""

_PIDFD_GETFD = 438
_TCP_USER_TIMEOUT = 18


class TcpTimeout:
    """Extends the time-outs of the connections of some processes, each connection once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._timeout_ms = int(seconds * 1000)
        self._due = 0.0
        self._seen: set[tuple[int, int, str]] = set()

    def poll(self, pids: Iterable[int]) -> None:
        """If a check is due, extends the time-out of every TCP connection that has a shorter time-out."""
        if kernel.LINUX and time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            self._seen = {key for pid in pids for key in self._extend_all(pid)}

    def _extend_all(self, pid: int) -> list[tuple[int, int, str]]:
        found = []
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # the process has ended, or the system is old
            return []
        try:
            for descriptor, target in kernel.open_files(pid).items():
                key = pid, descriptor, target
                if target.startswith("socket:"):
                    found.append(key)
                    if key not in self._seen:
                        with contextlib.suppress(OSError):  # a socket that refuses this keeps its time-out
                            self._extend(pidfd, descriptor)
        finally:
            os.close(pidfd)
        return found

    def _extend(self, pidfd: int, number: int) -> None:
        descriptor = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, number, 0)
        if descriptor < 0:  # the kernel is too old, or refuses
            return
        with socket.socket(fileno=descriptor) as shared:
            if shared.family not in (socket.AF_INET, socket.AF_INET6) or shared.type != socket.SOCK_STREAM:
                return
            now_ms = shared.getsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT)
            if 0 < now_ms < self._timeout_ms:  # 0: the kernel's own limit
                shared.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, self._timeout_ms)
