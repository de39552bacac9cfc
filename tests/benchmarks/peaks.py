"""The peak memory of processes, read without disturbing the measurement: the kernel records it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAUSE_S = 0.25
"""Pause between readings: finding the agent takes milliseconds of CPU time, which the rival does not spend."""


def peak_rss(pids: Iterable[int]) -> int:
    """The sum of the peaks, in bytes, of the processes that still exist."""
    return sum(_peak_rss(pid) for pid in pids)


def _peak_rss(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found is not None else 0
