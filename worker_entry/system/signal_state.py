"""What a process would do about a signal, as /proc shows it; Linux only."""

from __future__ import annotations

import contextlib

from worker_entry.system.kernel import LINUX
from worker_entry.system.proc_files import read_small


def may_notice(pid: int, signum: int) -> bool:
    """Whether the process catches or blocks the signal; True if that is not known, False if the process is gone.

    A process that is inside `sigwait` does neither, as far as can be seen.
    """
    if not LINUX:
        return True
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = (line.split() for line in read_small(f"/proc/{pid}/status").splitlines())
        masks = (int(field[1], 16) for field in fields if field and field[0] in (b"SigBlk:", b"SigCgt:"))
        return any(mask >> (signum - 1) & 1 for mask in masks)
    return False
