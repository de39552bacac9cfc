"""Inspects Keras's source code and the current strategy, for the patches."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def calls_of(function: Callable[..., Any], name: str) -> list[ast.Call]:
    """The calls `….name(…)` in the function's source."""
    return [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def is_constant(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def is_multi_worker(trainer: Any, strategy: Any) -> bool:
    return bool(trainer._collective_all_reduce_multi_worker(strategy))


def find_shared_context(trainer: Any) -> Any:
    """The current replica context if there are several replicas, else None; also None on TPUs."""
    distribute = trainer.tf.distribute
    context = distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or isinstance(context.strategy, distribute.TPUStrategy):
        return None
    return context
