"""Reports a program that sets or removes TF_CONFIG, and ignores the change unless the user wants it.

Tutorials set TF_CONFIG for their own cluster, with the same task everywhere, or remove it first. Under a launcher,
either all tasks would then be the same task, or every task would train alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

NAME = "TF_CONFIG"


def install(report: Callable[[str, bool], None], *, keep: bool) -> None:
    """Starts to watch `os.environ` for the program's changes to TF_CONFIG.

    Args:
        report: called with the first line that sets or removes TF_CONFIG, such as `train.py:12`, and with `keep`.
        keep: whether the program's own TF_CONFIG takes effect.
    """
    environ: type[Any] = type(os.environ)
    reported: list[str] = []

    def refuses(name: object, value: object) -> bool:
        if name != NAME or value == os.environ.get(NAME):
            return False
        if not reported:
            reported.append(_line())
            report(reported[0], keep)
        return not keep

    class Watched(environ):  # type: ignore[misc]  # its base is only known at run time
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
