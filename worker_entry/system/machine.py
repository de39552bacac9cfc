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
    """Identifies the processes that this one can see, for a process that looks later whether they are there.

    Two processes with equal views see the same processes. Empty on systems where that cannot be known.
    """
    boot, namespace = boot_id(), pid_namespace()
    return f"{boot} {namespace} {socket.gethostname()}" if boot and namespace else ""


def is_same_view(view: str) -> bool:
    """Whether this process sees what a process with this view has seen."""
    return bool(view) and view.split(" ", 2)[:2] == process_view().split(" ", 2)[:2]


def has_restarted(view: str) -> bool:
    """Whether this machine was started again since; another machine with the same hostname is not expected."""
    parts, now = view.split(" ", 2), process_view().split(" ", 2)
    return len(parts) == len(now) == 3 and parts[0] != now[0] and parts[2] == now[2]
