"""Wording shared by the sentences that users read."""

from __future__ import annotations


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """`1 task`, `2 tasks`, `0 processes`; `plural` is needed if it is not `noun` plus s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def rough_duration(seconds: float) -> str:
    """`42s`, `5m`, `3h`, `12d`: one number, for a column of a table; at least two of a unit, but of seconds."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
