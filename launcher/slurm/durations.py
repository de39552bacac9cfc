"""Durations as Slurm writes them."""

from __future__ import annotations


def parse_seconds(text: str) -> float:
    """`30 sec`, `20`, `00:00:20` or `1-00:00:00`; 0 for anything else, such as `UNLIMITED`."""
    days, _, clock = text.partition(" ")[0].rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")):
        return 0.0
    seconds = 0
    for part in parts:
        seconds = seconds * 60 + int(part)
    return float(seconds + int(days or "0") * 86_400)
