"""Identifies this machine, its boot, and the processes that can be seen from here."""

from __future__ import annotations

import contextlib
import os
import socket


def boot_id() -> str:
    """The id of the running kernel, which the containers of a machine share; empty on systems without one."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        return stream.read().strip()
    return ""


def pid_namespace() -> str:
    """The PID namespace of this process; empty on systems without one."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def process_view() -> str:
    """Identifies the set of processes that this one can see; a later process uses it to check whether they have ended.

    Two processes with equal views see the same processes. Empty on systems where that cannot be known.
    """
    boot, namespace = boot_id(), pid_namespace()
    return f"{boot} {namespace} {socket.gethostname()}" if boot and namespace else ""


def is_same_view(view: str) -> bool:
    """Whether this process sees the same processes as a process with this view."""
    return bool(view) and view.split(" ", 2)[:2] == process_view().split(" ", 2)[:2]


def has_restarted(view: str) -> bool:
    """Whether this machine has rebooted since the view was made; assumes that hostnames are unique."""
    parts, now = view.split(" ", 2), process_view().split(" ", 2)
    return len(parts) == len(now) == 3 and parts[0] != now[0] and parts[2] == now[2]
