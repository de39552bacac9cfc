"""Reads from /proc the resources that processes have used since they started; Linux only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Optional

from worker_entry.protocol.frozen import dataclass
from worker_entry.system.proc_files import read_small

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
QUIET = 3
"""A thread that has not run for this many readings in a row is read rarely."""
RARELY = 8
"""A reading covers every running thread, and one eighth of the others in turn."""
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True)
class ProcessUse:
    """The resources that one process has used.

    `cpu_s`: seconds on a core. `read`, `written`: bytes through files, pipes and sockets. These three include ended
    children that the process has waited for. `memory`: resident bytes.
    """

    cpu_s: float = 0.0
    memory: int = 0
    threads: int = 0
    read: int = 0
    written: int = 0


def read_use(pid: int) -> ProcessUse:
    """Returns a process's use; all zeros if it is gone. Another user's process has unknown I/O, which counts as 0."""
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
    """Returns the bytes of a process in swap; 0 if the process is gone."""
    try:
        found = read_small(f"/proc/{pid}/status").partition(b"\nVmSwap:")[2]
        return int(found.split(None, 1)[0]) << 10
    except (OSError, ValueError, IndexError):
        return 0


def read_own_memory(pid: int) -> int:
    """Returns a process's bytes of anonymous memory, with its part of shared memory; 0 if unknown."""
    try:
        found = re.search(rb"^Pss_Anon:\s+(\d+)", read_small(f"/proc/{pid}/smaps_rollup"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found is not None else 0


class StarvedTime:
    """The time in which threads were ready to run but had no core, including threads that have ended.

    Most threads of a TensorFlow process never run. A thread that has not run for some readings is read less often from
    then on; its waiting time is not lost, but may be counted some samples later.
    """

    def __init__(self) -> None:
        self._threads: dict[str, _Thread] = {}
        self._ended = 0
        self._readings = 0
        self._has_run = False

    def update(self, pids: Iterable[int]) -> Optional[float]:
        """Returns the seconds so far of all threads of these processes; None if the kernel does not count them."""
        threads: dict[str, _Thread] = {}
        self._readings += 1
        # If no descriptor is left for reading them all, the last values of all threads are kept.
        with contextlib.suppress(OSError):
            for pid in pids:
                with contextlib.suppress(*_GONE):
                    self._read(pid, threads)
            self._ended += sum(thread.waited for name, thread in self._threads.items() if name not in threads)
            self._threads = threads
        waited = self._ended + sum(thread.waited for thread in self._threads.values())
        return round(waited / 1e9, 6) if self._has_run else None

    def _read(self, pid: int, threads: dict[str, _Thread]) -> None:
        """Reads the threads of a process, and adds them to `threads`."""
        folder = os.open(f"/proc/{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in os.listdir(folder):
                thread = self._threads.get(name) or _Thread()
                if thread.quiet < QUIET or (self._readings + int(name)) % RARELY == 0:
                    try:
                        text = read_small(f"{name}/schedstat", folder)
                    except _GONE:  # the thread is gone, or the kernel has no such file
                        continue
                    self._note(thread, text)
                threads[name] = thread
        finally:
            os.close(folder)

    def _note(self, thread: _Thread, text: bytes) -> None:
        if text == thread.text:
            thread.quiet += 1
            return
        ran, waited, _ = text.split()
        # A kernel that can count waiting times but does not shows zeros for all threads.
        self._has_run = self._has_run or ran != b"0"
        if int(waited) < thread.waited:  # a later thread with the same number
            self._ended += thread.waited
        thread.text, thread.waited, thread.quiet = text, int(waited), 0


class _Thread:
    """The last reading of a thread: `waited` in nanoseconds; `quiet`: how many readings in a row it has not run."""

    __slots__ = ("quiet", "text", "waited")

    def __init__(self) -> None:
        self.text, self.waited, self.quiet = b"", 0, 0
