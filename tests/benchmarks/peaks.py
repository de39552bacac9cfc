"""How much memory processes have used at most, without disturbing what is measured: the kernel remembers it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAUSE_S = 0.25
"""Between two looks: finding an agent's processes takes milliseconds of a core, which the rival does not spend."""


def peak_rss(pids: Iterable[int]) -> int:
    """Bytes: the sum of what each has used at most, of those that are still there."""
    return sum(_peak_rss(pid) for pid in pids)


def _peak_rss(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found is not None else 0
