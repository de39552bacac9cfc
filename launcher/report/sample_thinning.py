"""Makes files of samples smaller: older samples get further apart, as far as they have to, and all equally far."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

RECENT = 0.25
"""The share of a file, at its end, that is not thinned."""
SHORTEST_S = 4.0
"""What is left of older samples is at least so far apart; then twice as far, and so on."""
LONGEST_S = 1e9

_HEAD = re.compile(rb'\{"sample":"([a-z]+)","time":([0-9.e+-]+)(?:,"node":("(?:[^"\\]|\\.)*"))?[,}].*\}\n')
"""The beginning of a line that `render_sample` has made: its kind, its time, and its node if it has one."""


def thin_lines(data: bytes, size: int) -> bytes:
    """The lines of a file of samples, in order, with an older part that has at most `size` bytes if that is possible.

    Of each kind and of each node, the older part keeps the first sample of every 4, 8, 16… seconds. Lines in it that
    are torn or strange are left out.
    """
    end = data.rfind(b"\n", 0, int(len(data) * (1 - RECENT))) + 1
    lines = [*_parse(data[:end].splitlines(keepends=True))]
    interval_s = SHORTEST_S
    while sum(len(line) for _, _, line in lines) > size and interval_s < LONGEST_S:
        last: dict[bytes, int] = {}
        kept = []
        for key, time, line in lines:
            interval = int(time // interval_s)
            if last.get(key) != interval:
                last[key] = interval
                kept.append((key, time, line))
        lines, interval_s = kept, 2 * interval_s
    return b"".join(line for _, _, line in lines) + data[end:]


def _parse(lines: Iterable[bytes]) -> Iterable[tuple[bytes, float, bytes]]:
    """What a line is a sample of, its time, and the line."""
    for line in lines:
        found = _HEAD.fullmatch(line)
        if found is None:
            continue
        try:
            time = float(found[2])
        except ValueError:
            continue
        if math.isfinite(time):
            yield found[1] + (found[3] or b""), time, line
