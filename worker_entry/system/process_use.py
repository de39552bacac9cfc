"""What processes have used since they began, as /proc shows it; Linux only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

from worker_entry.system.proc_files import read_small

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class ProcessUse:
    """What one process has used.

    `cpu_s`: seconds on a core; `read`, `written`: bytes through files, pipes and sockets. These three include children
    that have ended and that it has waited for. `memory`: resident bytes.
    """

    cpu_s: float = 0.0
    memory: int = 0
    threads: int = 0
    read: int = 0
    written: int = 0


def read_use(pid: int) -> ProcessUse:
    """What a process has used; nothing if it is gone. I/O of another user's process is not known, and counts as 0."""
    try:
        # proc(5): the second field is the command's name in parentheses, which may contain any character.
        fields = read_small(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        cpu_s, threads, memory = sum(map(int, fields[11:15])) * TICK_S, int(fields[17]), int(fields[21]) * _PAGE
    except (OSError, ValueError, IndexError):
        return ProcessUse()
    try:
        lines = read_small(f"/proc/{pid}/io").split(b"\n", 2)
        read, written = int(lines[0].removeprefix(b"rchar: ")), int(lines[1].removeprefix(b"wchar: "))
    except (OSError, ValueError, IndexError):
        read = written = 0
    return ProcessUse(cpu_s, memory, threads, read, written)


def read_swapped(pid: int) -> int:
    """Bytes of a process that are in swap; 0 if it is gone."""
    try:
        found = read_small(f"/proc/{pid}/status").partition(b"\nVmSwap:")[2]
        return int(found.split(None, 1)[0]) << 10
    except (OSError, ValueError, IndexError):
        return 0


class StarvedTime:
    """For how long threads could have run and had no core; what a thread has waited stays when it ends."""

    def __init__(self) -> None:
        self._threads: dict[str, int] = {}
        self._ended = 0
        self._has_run = False

    def update(self, pids: Iterable[int]) -> Optional[float]:
        """Seconds until now, of all threads of these processes together; None if the kernel does not count them."""
        threads: dict[str, int] = {}
        # With no descriptor left to read them all, the threads are as they were.
        with contextlib.suppress(OSError):
            for pid in pids:
                with contextlib.suppress(*_GONE):
                    self._read(pid, threads)
            for thread, waited_ns in self._threads.items():
                if waited_ns > threads.get(thread, 0):  # it has ended; another one may have its number
                    self._ended += waited_ns
            self._threads = threads
        return round((self._ended + sum(self._threads.values())) / 1e9, 6) if self._has_run else None

    def _read(self, pid: int, threads: dict[str, int]) -> None:
        """Adds the nanoseconds that each thread of a process has waited."""
        folder = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for thread in os.listdir(folder):
                try:
                    ran, waited, _ = read_small(f"{thread}/schedstat", folder).split()
                except _GONE:  # or the kernel has no such file
                    continue
                threads[thread] = int(waited)
                # A kernel that can count and does not has zeros for all.
                self._has_run = self._has_run or ran != b"0"
        finally:
            os.close(folder)
