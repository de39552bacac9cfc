"""Moves this process into a separate network that has only a loopback interface (unshare(2)); Linux only.

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
    """Enters a new network namespace and, for an ordinary user, a user namespace in which only this user exists.

    This process must have one thread. It stays in the network, and so do all processes that it starts.

    Raises:
        OSError: this system does not allow that.
    """
    user, group, parent = os.geteuid(), os.getegid(), os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if not kernel.LINUX or not hasattr(libc, "unshare"):
        raise OSError(errno.ENOTSUP, "not a Linux system")
    if libc.unshare(_NEW_NETWORK if user == 0 else _NEW_NETWORK | _NEW_USER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, "the limit on namespaces is reached" if number == errno.ENOSPC else os.strerror(number))
    if user != 0:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
        # A change of privileges resets both: whether other processes may inspect this one, and its parent-death signal.
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
