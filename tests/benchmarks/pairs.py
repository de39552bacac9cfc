"""Times two ways of doing the same thing in turn, so that a drift of the machine's speed affects both alike."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def time_pairs(ours: Callable[[], float], rival: Callable[[], float], runs: int) -> tuple[list[float], list[float]]:
    """Runs both in turn, once uncounted and then `runs` times; returns the seconds that each reported."""
    mine, theirs = [], []
    for number in range(runs + 1):
        one, other = ours(), rival()
        if number:
            mine.append(one)
            theirs.append(other)
    return mine, theirs


def print_pair(title: str, ours: Sequence[float], rival: Sequence[float], unit: str = "s") -> None:
    """Prints both medians and their spread, and the medians of the pairs' ratios and differences."""
    ratio = statistics.median(one / other for one, other in zip(ours, rival, strict=True))
    difference = statistics.median(one - other for one, other in zip(ours, rival, strict=True))
    print(
        f"  {title:<24} {_show(ours)} {unit}   rival {_show(rival)} {unit}   "
        f"ratio {ratio:.3f}   difference {difference:+.2f} {unit}",
        flush=True,
    )


def _show(values: Sequence[float]) -> str:
    return f"{statistics.median(values):8.3f} ({min(values):.3f} to {max(values):.3f})"


def time_command(argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> float:
    """Wall seconds of a command that must succeed; its output is discarded."""
    started = time.perf_counter()
    subprocess.run(
        argv,
        check=True,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - started
