"""Detects that this machine, or our control group, runs out of memory: by the kernel's pressure counters and events."""

from __future__ import annotations

import contextlib
import os
import re

from worker_entry.system.cgroups import find_file

PRESSURE = "/proc/pressure/memory"
SHARE = 10.0
"""Percent of the last 10 s in which some process waited for memory; above this, memory is short."""
EVENTS = ("high", "max", "oom")
LEAST_FREE = 0.04
"""Share of the machine's memory; with less available, memory is short."""
FIRST_VICTIM = 1000
"""The OOM killer kills a process with this score before all others."""


class MemoryPressure:
    """Detects memory pressure, and OOM events from its construction on."""

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
