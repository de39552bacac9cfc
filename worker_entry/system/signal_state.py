"""Reads from /proc how a process would react to a signal; Linux only."""

from __future__ import annotations

import contextlib

from worker_entry.system.kernel import LINUX
from worker_entry.system.process_use import read_small


def may_notice(pid: int, signum: int) -> bool:
    """Whether the process catches or blocks the signal; True if that is unknown, False if the process is gone.

    /proc shows neither for a process that is inside `sigwait`.
    """
    if not LINUX:
        return True
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = (line.split() for line in read_small(f"/proc/{pid}/status").splitlines())
        masks = (int(field[1], 16) for field in fields if field and field[0] in (b"SigBlk:", b"SigCgt:"))
        return any(mask >> (signum - 1) & 1 for mask in masks)
    return False
