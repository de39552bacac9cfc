"""The tf.distribute strategies that a program builds: some need patches, some are of a process that meets no other."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from worker_entry.hooks.import_hooks import after_import

JAX = "jax"
STRATEGIES = "tensorflow.python.distribute.distribute_lib"
DEFAULT = "_DefaultDistributionStrategy"
"""How the names of those begin that are there without the program's doing."""


def watch_jax(tell: Callable[[str], None]) -> None:
    """From now on, `tell` hears of a program that imports JAX, and has not imported TensorFlow before."""
    after_import(JAX, lambda _: None if "tensorflow" in sys.modules else tell(JAX))


def watch_strategies(then: Callable[[Any], None]) -> None:
    """From now on, `then` is called with each strategy that the program has built; it must not raise."""

    def watch(module: ModuleType) -> None:
        base = getattr(module, "StrategyBase", None)
        if base is None:
            return
        original = base.__init__

        @functools.wraps(original)
        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if not type(self).__name__.startswith(DEFAULT):
                then(self)

        base.__init__ = initialize

    after_import(STRATEGIES, watch)
