"""Makes files of samples smaller: spaces the older samples further apart, evenly and only as far as necessary."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

RECENT = 0.25
"""The share of a file, at its end, that is not thinned."""
SHORTEST_S = 4.0
"""The least interval between older samples; it is doubled until they are small enough."""
LONGEST_S = 1e9

_HEAD = re.compile(rb'\{"sample":"([a-z]+)","time":([0-9.e+-]+)(?:,"node":("(?:[^"\\]|\\.)*"))?[,}].*\}\n')
"""A line of `render_sample`, with its kind, its time, and its node if it has one."""


def thin_lines(data: bytes, size: int) -> bytes:
    """Returns the lines of a file of samples, in order; reduces the older part to at most `size` bytes if possible.

    Of each kind and node, the older part keeps the first sample of every 4, 8, 16… seconds. Torn or malformed lines in
    it are removed.
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
    """Yields the kind and node of each line's sample, its time, and the line."""
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
