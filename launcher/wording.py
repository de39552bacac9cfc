"""Wording shared by messages to users."""

from __future__ import annotations

import time
from collections.abc import Sequence

from launcher.tasks import LOCAL

DAY_S = 86_400
EXACT_S = 100.0
"""Durations below this are shown with tenths of seconds."""
SHOWN_LIMIT = 20
"""The most lines of a list, such as that of errors: users correct the first ones first."""


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """`1 task`, `2 tasks`, `0 processes`; `plural` is needed if it is not `noun` plus s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def name_errors(count: int) -> str:
    """`an error`, `1,200 errors`."""
    return "an error" if count == 1 else count_of(count, "error")


def shorten(lines: Sequence[str], before: str = "") -> list[str]:
    """The first lines of a long list, and `and 3 more`, which `before` precedes."""
    more = len(lines) - SHOWN_LIMIT
    return [*lines[:SHOWN_LIMIT], *([f"{before}and {more:,} more"] if more > 0 else [])]


def render_run(nodes: Sequence[str], command: str) -> str:
    """`on gpu-a, gpu-b, run: true`; on this machine, `run: true`."""
    return f"run: {command}" if [*nodes] == [LOCAL] else f"on {', '.join(nodes)}, run: {command}"


def render_ago(then: float, now: float) -> str:
    """How long ago that was: `42 s ago`, `39 min ago`, `2 h 5 min ago`; beyond a day, when it was. Unix seconds."""
    age = max(now - then, 0.0)
    if age >= DAY_S:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(then))
    return f"{render_age(age // 60 * 60 if age >= 60 else age)} ago"


def render_age(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 5 min`, `4 d 3 h`: the two largest units."""
    whole = max(int(seconds), 0)
    for size, unit, part, name in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{whole} s"


def render_duration(seconds: float) -> str:
    """How long something took: `0.3 s`, `41.2 s`, `3 min 20 s`."""
    return f"{seconds:.1f} s" if seconds < EXACT_S else render_age(seconds)


def render_step_time(seconds: float) -> str:
    """`23.1 ms`, `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
