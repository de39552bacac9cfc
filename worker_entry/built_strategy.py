"""Which tf.distribute strategy a program builds: workers that build one of a single process never meet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from worker_entry.after_import import after_import

STRATEGIES = "tensorflow.python.distribute.distribute_lib"
DEFAULT = "_DefaultDistributionStrategy"
"""The one that is there without the program's doing."""


def install(tell: Callable[[str], None]) -> None:
    """From now on, `tell` hears the class's name of each strategy that is built."""

    def watch(module: ModuleType) -> None:
        base = getattr(module, "StrategyBase", None)
        if base is None:
            return
        original = base.__init__

        @functools.wraps(original)
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            name = type(self).__name__
            if not name.startswith(DEFAULT):
                tell(name)

        base.__init__ = initialize

    after_import(STRATEGIES, watch)
