"""Finds the processes that hold a lock on a file, even if the file has been removed; Linux only."""

from __future__ import annotations

import contextlib
import os

from worker_entry.system import kernel

DELETED = " (deleted)"
"""What the kernel appends to the name of a removed file."""


def find_holders(prefix: str, name: str) -> list[tuple[int, str]]:
    """The pids of this user's processes that hold an exclusive `flock` on a file, each with the file's folder.

    Args:
        prefix: how the folder's own name begins.
        name: the file's name.
    """
    found = []
    for pid in kernel.pids() if kernel.LINUX else ():
        for descriptor, path in kernel.open_files(pid).items():
            folder, _, last = path.rpartition("/")
            is_meant = last in (name, name + DELETED) and os.path.basename(folder).startswith(prefix)
            if is_meant and _is_locked(pid, descriptor):
                found.append((pid, folder))
    return found


def _is_locked(pid: int, descriptor: int) -> bool:
    """proc(5): `fdinfo` lists the locks that a descriptor's open file holds; `->` marks one that waits."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as stream:
        words = (line.split() for line in stream if line.startswith("lock:"))
        return any("FLOCK" in each and "WRITE" in each and "->" not in each for each in words)
    return False  # closed meanwhile
