"""Slurm's short forms of lists: `rack[1-2]n[01-03,7],gpu9-ib` for hosts, `16(x3),8` for numbers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

LIMIT = 100_000
"""Hosts in a list; more is a mistake."""

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def parse_host_list(text: str) -> list[str]:
    """The hosts in Slurm's order; leading zeros of their numbers stay.

    Raises:
        ValueError: the text is not such a list.
    """
    hosts: list[str] = []
    for part in _split(text):
        hosts += _expand(part)
        if len(hosts) > LIMIT:
            raise ValueError(f"more than {LIMIT:,} hosts")
    return hosts


def _split(text: str) -> Iterator[str]:
    """The parts between the commas that are not within brackets."""
    depth, start = 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"brackets within brackets in {text[:80]!r}")
        if char == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise ValueError(f"a bracket is not closed in {text[:80]!r}")
    yield text[start:]


def _expand(part: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)
    if not any(pieces):
        raise ValueError("a host without a name")
    choices = [[piece] if index % 2 == 0 else [*_numbers(piece)] for index, piece in enumerate(pieces)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"expected numbers like 1-4,07, got {text[:80]!r}")
        first, last = found[1], found[2] or found[1]
        if int(last) - int(first) > LIMIT:
            raise ValueError(f"more than {LIMIT:,} hosts")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def parse_counts(text: str) -> list[int]:
    """`2(x3),1` → [2, 2, 2, 1]: a number for each node.

    Raises:
        ValueError: the text is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = _COUNT.fullmatch(part)
        times = int(found[2] or 1) if found is not None else 0
        if found is None or len(counts) + times > LIMIT:
            raise ValueError(f"expected numbers like 2(x3),1, got {text[:80]!r}")
        counts += [int(found[1])] * times
    return counts
