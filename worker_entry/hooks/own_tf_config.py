"""A program that sets or removes TF_CONFIG by itself: it is noticed, and has no effect unless the user wants it to.

Tutorials set one for a cluster of their own, with the same task everywhere, or remove it first. Under a launcher every
task would then train by itself, or all would be the same one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

NAME = "TF_CONFIG"


def install(tell: Callable[[str, bool], None], *, keep: bool) -> None:
    """From now on, a line of the program that sets another TF_CONFIG, or removes it, is reported.

    Args:
        tell: called with the first such line, as `train.py:12`, and with `keep`.
        keep: whether the program's own TF_CONFIG takes effect.
    """
    environ: type[Any] = type(os.environ)
    told: list[str] = []

    def refuses(name: object, value: object) -> bool:
        if name != NAME or value == os.environ.get(NAME):
            return False
        if not told:
            told.append(_line())
            tell(told[0], keep)
        return not keep

    class Watched(environ):  # type: ignore[misc]  # its base is known at run time only
        def __setitem__(self, name: Any, value: Any) -> None:
            if not refuses(name, value):
                super().__setitem__(name, value)

        def __delitem__(self, name: Any) -> None:
            if not refuses(name, None):
                super().__delitem__(name)

    Watched.__name__, Watched.__qualname__ = environ.__name__, environ.__qualname__
    os.environ.__class__ = Watched


def _line() -> str:
    """The line of the program that changes its environment."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__") in ("os", "_collections_abc", "collections.abc"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
