"""Keeps TensorFlow from overwriting arrays of the program that a generator or a `tf.numpy_function` returns.

TensorFlow uses the memory of such an array if it is aligned, as if TensorFlow owned it. A strategy that divides a batch
among replicas lets the next operation write its result there. This silently changes the program's data during training,
but only for some arrays. With this hook, TensorFlow gets a copy.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from worker_entry.hooks.built_strategy import after_strategy
from worker_entry.hooks.import_hooks import after_import

SCRIPT_OPS = "tensorflow.python.ops.script_ops"


def install() -> None:
    """Copies arrays as soon as the program has made a strategy with several replicas."""
    after_strategy(lambda: after_import(SCRIPT_OPS, _patch), several=True)


def _patch(module: ModuleType) -> None:
    registry = getattr(module, "FuncRegistry", None)
    convert = getattr(registry, "_convert", None)
    if registry is None or convert is None:
        return

    @functools.wraps(convert)
    def copied(value: Any, *args: Any, **kwargs: Any) -> Any:
        result = convert(value, *args, **kwargs)
        return result.copy() if result is value or getattr(result, "base", None) is not None else result

    registry._convert = staticmethod(copied)
