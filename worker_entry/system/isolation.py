"""Moves this process into a network of its own, with a loopback interface and nothing else (unshare(2)); Linux only.

No port of this process and its children can be reached from outside, not even by other users of this machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct

from worker_entry.system import kernel

_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_SET_INTERFACE_FLAGS = 0x8914
_UP_AND_RUNNING = 0x41
_SET_DUMPABLE = 4


def enter_own_network() -> None:
    """An ordinary user gets a user namespace as well, in which only this user exists.

    This process must have one thread. It stays in the network, and so does everything that it starts.

    Raises:
        OSError: this system does not allow it.
    """
    user, group, parent = os.geteuid(), os.getegid(), os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not kernel.LINUX or not hasattr(libc, "unshare"):
        raise OSError(errno.ENOTSUP, "it is not Linux")
    if libc.unshare(_NEW_NETWORK if user == 0 else _NEW_NETWORK | _NEW_USER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "the limit of namespaces is reached" if number == errno.ENOSPC else os.strerror(number))
    if user != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
        # The kernel takes both from a process whose privileges change: who may look at it, and who ends with whom.
        libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
        kernel.die_with_parent(signal.SIGTERM, parent)
    _start_loopback()


def _start_loopback() -> None:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, struct.pack("16sH14x", b"lo", _UP_AND_RUNNING))


def _write(path: str, text: str) -> None:
    with open(path, "wb") as stream:
        stream.write(text.encode())
