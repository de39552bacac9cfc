"""One run from start to end, with all of its effects.

In: a `ClusterSpec`. Out: a `RunReport` and the run's folder; nothing is left running.

`from launcher import run` also gives this package, so the package can be called like `launcher.python.calls.run`.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import launcher


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return launcher.find("run")(*args, **arguments)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature that `help` and notebooks show."""
        return inspect.signature(launcher.find("run"))


sys.modules[__name__].__class__ = _Callable
