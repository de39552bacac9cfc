"""Wording shared by the sentences that users read."""

from __future__ import annotations


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """`1 task`, `2 tasks`, `0 processes`; `plural` is needed if it is not `noun` plus s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
