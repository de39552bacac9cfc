"""Detects that memory runs out: memory pressure, and processes killed by the OOM killer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import Optional

from worker_entry.protocol.values import Problem, TaskExit
from worker_entry.system.cgroups import OWN, ROOT, find_file

PRESSURE = "/proc/pressure/memory"
SHARE = 10.0
"""Percent of the last 10 s in which some process waited for memory; above this, memory is short."""
EVENTS = ("high", "max", "oom")
LEAST_FREE = 0.04
"""Share of the machine's memory; with less available, memory is short."""
FIRST_VICTIM = 1000
"""The OOM killer kills a process with this score before all others."""
KERNEL_LOG = "/dev/kmsg"
POLL_S = 2.0
"""How often the kernel's counter is read while nothing ends."""
RECENT_S = 10.0
"""A kill that was counted longer ago does not explain an end: it was another process's."""
_VICTIM = re.compile(r"Killed process (\d+) \(.*anon-rss:(\d+)kB")
_HINT = "lower the batch size, or give the task more memory"


class MemoryPressure:
    """Detects that this machine, or our control group, runs out of memory: by pressure, and by OOM events since now."""

    def __init__(self, pressure: str = PRESSURE, meminfo: str = "/proc/meminfo") -> None:
        self._sources = [pressure, find_file("memory", "memory.pressure_level", "memory.pressure") or ""]
        self._meminfo = meminfo
        self._events = find_file("memory", "memory.events", "memory.events") or ""
        self._before = self._count()

    def exists(self) -> bool:
        """Whether memory is short."""
        for source in self._sources:
            found = re.search(r"some avg10=([0-9.]+)", _read(source))
            if found is not None and float(found[1]) > SHARE:
                return True
        facts = dict(re.findall(r"(\w+):\s+(\d+)", _read(self._meminfo)))
        total, available = (int(facts.get(name, 0)) for name in ("MemTotal", "MemAvailable"))
        return self._count() > self._before or available < LEAST_FREE * total

    def _count(self) -> int:
        counts = dict(re.findall(r"(\w+) (\d+)", _read(self._events)))
        return sum(int(counts.get(name, 0)) for name in EVENTS)


def yield_first(pid: int) -> str:
    """Makes the OOM killer choose the process before all others; returns its old score for `restore_score`."""
    path = f"/proc/{pid}/oom_score_adj"
    before = _read(path).strip()
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as stream:
        stream.write(str(FIRST_VICTIM))
    return before


def restore_score(pid: int, score: str) -> bool:
    """Restores the score of the process; returns whether the kernel allows that."""
    path = f"/proc/{pid}/oom_score_adj"
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as stream:
        stream.write(score)
    return _read(path).strip() == score


def _read(path: str) -> str:
    try:
        with open(os.fspath(path), encoding="ascii", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


class OomWatch:
    """Detects kills by the kernel's counters and log, from its construction on.

    Tasks are in our control group, unless they have left it.
    """

    def __init__(self, cgroups: str = ROOT, own: str = OWN, log: str = KERNEL_LOG) -> None:
        self._counter = find_file("memory", "memory.oom_control", "memory.events", root=cgroups, own=own) or ""
        self._counted = self._count()
        self._new = 0
        """How many processes were killed at the last change of the counter, and when that was seen."""
        self._changed = self._due = float("-inf")
        self._victims: dict[int, int] = {}
        self._log = -1
        with contextlib.suppress(OSError):  # the system has no such log, or we may not read it
            self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def poll(self, now: float) -> None:
        """Reads the kernel's counter if that is due; `now`: monotonic seconds."""
        if now >= self._due:
            self._due = now + POLL_S
            count = self._count()
            if count != self._counted:
                self._new, self._counted, self._changed = count - self._counted, count, now

    def find(self, pid: int, how: TaskExit, now: float) -> Optional[Problem]:
        """Returns the evidence that a process that has just ended was out of memory; None if there is none."""
        if how.signal != signal.SIGKILL and how.code != 128 + signal.SIGKILL:
            return None
        self._read_log()
        self._due = now
        self.poll(now)
        if pid in self._victims:
            held = self._victims.pop(pid) >> 10
            return Problem("out-of-memory", f"the kernel's OOM killer killed it; it held {held:,} MiB", _HINT)
        if self._new > 0 and now - self._changed < RECENT_S:
            what = "a process" if self._new == 1 else f"{self._new} processes"
            return Problem("out-of-memory", f"the kernel's OOM killer killed {what} in its control group", _HINT)
        return None

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError), open(self._counter, encoding="ascii") as stream:
            return next((int(line.split()[1]) for line in stream if line.startswith("oom_kill ")), 0)
        return 0

    def _read_log(self) -> None:
        while self._log >= 0:
            try:
                record = os.read(self._log, 1 << 13).decode(errors="replace")
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                return
            if not record:  # a file, in a test
                return
            self._victims.update((int(victim[1]), int(victim[2])) for victim in _VICTIM.finditer(record))
