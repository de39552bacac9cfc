"""Colours that are readable on black and on white: each has a contrast of at least 3.5 to both.

They are numbers of the 256 colours of terminals, whose meaning, unlike that of the first 16, is the same everywhere.
"""

from __future__ import annotations

CYAN, ORANGE, GREEN, RED = 30, 130, 28, 160
TASKS = (CYAN, ORANGE, 33, 163, GREEN, 98, 100, 161, 31, 64)
"""The colours of the tasks, in order."""


def style(number: int, *, bold: bool = False) -> str:
    """The colour as a style of rich."""
    return f"{'bold ' if bold else ''}color({number})"
