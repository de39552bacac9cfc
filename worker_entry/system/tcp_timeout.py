"""Keeps a network that was away for a moment from ending a training: TensorFlow's connections wait as long as we do.

gRPC has the kernel reset a connection on which nothing was confirmed for 20 s, and offers TensorFlow's users no way to
say otherwise. The kernel does: we are the parent of the tasks, so their sockets are ours to look at (Linux 5.6).
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Iterable

from worker_entry.system import kernel

EVERY_S = 5.0
"""How often new connections are looked for; one that is younger has its 20 s before it."""

_PIDFD_GETFD = 438
_TCP_USER_TIMEOUT = 18


class TcpTimeout:
    """For the connections of some processes; those that have been seen to already are not looked at again."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._timeout_ms = int(seconds * 1000)
        self._due = 0.0
        self._seen: set[tuple[int, str, str]] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Lengthens, if it is time for it, the time-out of every TCP connection that has a shorter one."""
        if kernel.LINUX and time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            self._seen = {key for pid in pids for key in self._look(pid)}

    def _look(self, pid: int) -> list[tuple[int, str, str]]:
        found = []
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # it has ended, or this is an old system
            return []
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                key = pid, name, os.readlink(f"/proc/{pid}/fd/{name}")
                if key[2].startswith("socket:"):
                    found.append(key)
                    if key not in self._seen:
                        self._lengthen(pidfd, int(name))
        except OSError:  # gone meanwhile
            pass
        finally:
            os.close(pidfd)
        return found

    def _lengthen(self, pidfd: int, number: int) -> None:
        descriptor = ctypes.CDLL(None).syscall(_PIDFD_GETFD, pidfd, number, 0)
        if descriptor < 0:  # the kernel is old, or does not let us
            return
        with socket.socket(fileno=descriptor) as shared:
            if shared.family not in (socket.AF_INET, socket.AF_INET6) or shared.type != socket.SOCK_STREAM:
                return
            now_ms = shared.getsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT)
            if 0 < now_ms < self._timeout_ms:  # 0 is for ever
                shared.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, self._timeout_ms)
