"""Times two ways of doing the same thing in turn, so that a drift of the machine's speed affects both alike."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADING = "| | distlaunch | rival | ratio |"
"""Of the table in tests/README.md that has a row for each `Row`."""


@dataclass(frozen=True)
class Row:
    """A row of the table, in Markdown: its first cell, and what the rival is.

    A test compares all rows with the table: each is a constant of its benchmark's module, or a value of such a dict.
    """

    title: str
    rival: str


@dataclass(frozen=True)
class Pair:
    """The figures of both sides, one of each for every run; without a row, they are printed only."""

    title: str
    ours: Sequence[float]
    rival: Sequence[float]
    unit: str = "s"
    row: Row | None = None

    @property
    def ratio(self) -> float:
        """The median of the runs' ratios, which is not the ratio of the medians."""
        return statistics.median(one / other for one, other in zip(self.ours, self.rival, strict=True))

    def render(self) -> str:
        """A line with both medians and their spread, the ratio, and the median of the runs' differences."""
        difference = statistics.median(one - other for one, other in zip(self.ours, self.rival, strict=True))
        return (
            f"  {self.title:<24} {_spread(self.ours)} {self.unit}   rival {_spread(self.rival)} {self.unit}   "
            f"ratio {self.ratio:.3f}   difference {difference:+.2f} {self.unit}"
        )

    def render_row(self) -> str | None:
        """The row of the table with both medians and the ratio."""
        if self.row is None:
            return None
        ours, rival = (f"{_figure(statistics.median(side))} {self.unit}" for side in (self.ours, self.rival))
        decimals = 3 if abs(self.ratio - 1) < 0.01 else 2  # some goals are 1.01
        return f"| {self.row.title} | {ours} | {self.row.rival}: {rival} | {self.ratio:.{decimals}f} |"


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):8.3f} ({min(values):.3f} to {max(values):.3f})"


def _figure(value: float) -> str:
    """At least three significant digits, without an exponent."""
    return f"{value:#.3g}" if value < 99.95 else f"{value:,.0f}"


def time_pairs(ours: Callable[[], float], rival: Callable[[], float], runs: int) -> tuple[list[float], list[float]]:
    """Runs both in turn, once uncounted and then `runs` times; returns the seconds that each reported."""
    mine, theirs = [], []
    for number in range(runs + 1):
        one, other = ours(), rival()
        if number:
            mine.append(one)
            theirs.append(other)
    return mine, theirs


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
