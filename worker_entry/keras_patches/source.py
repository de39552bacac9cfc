"""Inspects Keras's source code and the current strategy, for the patches."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any, Optional

from worker_entry.hooks import own_tf_config

CALLBACK = "keras.src.callbacks.callback"
COMMON_TRAINER = "keras.src.trainers.trainer"
"""The module of the trainer that all backends share."""
RENAMED = {"keras.src.backend.tensorflow.core": "keras.src.backend.tensorflow.ops.core"}
"""Modules with other names since Keras 3.16."""


def is_random_state(variable: Any) -> bool:
    """Whether this is the state of one of Keras's random generators."""
    return bool(variable.path.endswith("seed_generator_state"))


def find_module(name: str) -> Any:
    """The imported module with this name, or with its newer name; None if there is none."""
    return sys.modules.get(name) or sys.modules.get(RENAMED.get(name, name))


def find_trainer(module: Any) -> Any:
    """The class of the backend's trainer in its module; since Keras 3.16, it has another name."""
    found = (getattr(module, name, None) for name in ("TensorFlowTrainer", "JAXTrainer", "Trainer"))
    return next(filter(None, found))


def find_common_trainer() -> Any:
    """The class of the trainer that all backends share; since Keras 3.16, it has another name."""
    module = sys.modules.get(COMMON_TRAINER)
    return getattr(module, "BaseTrainer", None) or getattr(module, "Trainer", None)


def calls_of(function: Callable[..., Any], name: str) -> list[ast.Call]:
    """The calls `….name(…)` in the function's source."""
    if not mentions(function, name):  # parsing all functions would take each task 20 ms
        return []
    return [
        node
        for node in ast.walk(parse(function))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def mentions(function: Callable[..., Any], name: str) -> bool:
    """Whether the function, or one that it contains, uses an attribute or a global variable of this name."""
    queue = [inspect.unwrap(function).__code__]
    while queue:
        code = queue.pop()
        if name in code.co_names:
            return True
        queue += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return False


@functools.cache
def parse(function: Callable[..., Any]) -> ast.Module:
    """The function's source."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def is_constant(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value == value


def is_multi_worker(trainer: Any, strategy: Any) -> bool:
    return bool(trainer._collective_all_reduce_multi_worker(strategy))


def flatten_callbacks(trainer: Any, callbacks: Any) -> list[Any]:
    """The callbacks that a program gives to `fit`: one, a list, or Keras's own list."""
    return list(trainer.tree.flatten(getattr(callbacks, "callbacks", callbacks))) if callbacks is not None else []


def with_callback(trainer: Any, model: Any, callbacks: Any, callback: Any, place: Optional[int] = None) -> Any:
    """The `callbacks` for `fit` with one more callback; by default, the new callback is last."""
    every = flatten_callbacks(trainer, callbacks)
    every.insert(len(every) if place is None else place, callback)
    if not hasattr(callbacks, "callbacks"):
        return every
    callbacks.callbacks[:] = every  # of a list of callbacks that the program has made
    callback.set_model(model)
    return callbacks


def change_callbacks(trainer: Any, change: Callable[[Any, Any], Any]) -> bool:
    """Makes `fit` use what `change` returns for the model and the callbacks; returns whether there is a `fit`."""
    original = getattr(find_trainer(trainer), "fit", None)
    if original is None:
        return False
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:  # Keras reports the error better
            return original(self, *args, **kwargs)
        bound.arguments["callbacks"] = change(self, bound.arguments.get("callbacks"))
        return original(*bound.args, **bound.kwargs)

    find_trainer(trainer).fit = fit
    return True


def number_of(strategy: Any) -> int:
    """This worker's number in the strategy's cluster; the chief is 0."""
    resolver = strategy.cluster_resolver
    if resolver is not None and resolver.task_type == "worker":
        return int(resolver.task_id) + ("chief" in resolver.cluster_spec().jobs)
    return 0


def worker_number() -> int:
    """This process's number among the workers that train; the chief is 0, and so is a process outside a cluster."""
    try:
        config = own_tf_config.read()
        task = config["task"]
        return int(task["index"]) + ("chief" in config["cluster"]) if task["type"] == "worker" else 0
    except (KeyError, TypeError, ValueError):
        return 0


def find_shared_context(trainer: Any) -> Any:
    """The current replica context if there are several replicas, else None; also None on TPUs."""
    distribute = trainer.tf.distribute
    context = distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or isinstance(context.strategy, distribute.TPUStrategy):
        return None
    return context
