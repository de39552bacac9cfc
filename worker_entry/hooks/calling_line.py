"""Finds the line of the program that has led to a call."""

from __future__ import annotations

import os
import sys

_STANDARD = os.path.join(os.path.dirname(os.__file__), "")


def calling_line(above: int = 1) -> str:
    """`train.py:12`, with the path: the nearest line outside the standard library (so not in `mock.patch.dict`).

    Args:
        above: how many callers of this function to leave out.
    """
    frame = sys._getframe(above + 1)
    while frame.f_back is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_standard(file: str) -> bool:
    """Whether a file belongs to Python itself."""
    rest = file[len(_STANDARD) :] if file.startswith(_STANDARD) else ""
    return file.startswith("<frozen ") or (bool(rest) and not rest.startswith(("site-packages", "dist-packages")))
