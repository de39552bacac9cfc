"""Patches Keras 3's variables under CentralStorageStrategy: `patching` describes the faults.

This strategy has one copy of each variable, and updates it in a merge call of all replicas. Keras expects each replica
to have its own copy, and assigns to it at any time, even inside a condition.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.source import calls_of, find_shared_context, mentions
from worker_entry.keras_patches.step import can_merge

VARIABLE = "keras.src.backend.tensorflow.core"

_AGGREGATING_VARIABLE = "tensorflow.python.distribute.ps_values", "AggregatingVariable"
_RESOURCE_VARIABLE = "tensorflow.python.ops.resource_variable_ops", "ResourceVariable"
_SYNC_ON_READ_VARIABLE = "tensorflow.python.distribute.values", "SyncOnReadVariable"


def patch_variable(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces methods of variables that fail under central storage."""
    variable = module.Variable
    initialize = getattr(variable, "_initialize", None)
    if initialize is not None and any(
        word.arg == "synchronization" for call in calls_of(initialize, "Variable") for word in call.keywords
    ):
        variable._initialize = _patched_initialize(trainer, initialize)
        yield patched("Variable._initialize")
    else:
        knows_strategy = initialize is not None and mentions(initialize, "get_strategy")
        yield unpatched("Variable._initialize", fixed=knows_strategy)
    assign = getattr(variable, "_direct_assign", None)
    if assign is not None and mentions(assign, "assign"):
        variable._direct_assign = _patched_assign(trainer, assign)
        yield patched("Variable._direct_assign")
    else:
        yield unpatched("Variable._direct_assign", fixed=assign is not None and mentions(assign, "merge_call"))


def patch_conversions(_: Any, module: Any, __: Any) -> Iterator[Finding]:
    """Lets `int(model.optimizer.iterations)` and the like work under a strategy, too."""
    variable = module.Variable
    convert = getattr(variable, "__float__", None)
    if convert is None or mentions(convert, "numpy"):
        yield unpatched("Variable.__float__", fixed=convert is not None)
        return
    for kind in (int, float):
        name = f"__{kind.__name__}__"
        if hasattr(variable, name):
            setattr(variable, name, _patched_conversion(getattr(variable, name), kind))
    yield patched("Variable.__float__")


def _patched_conversion(original: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(self: Any) -> Any:
        try:
            return original(self)
        except TypeError:
            if self.ndim:
                raise
            return kind(self.numpy())  # the strategy's variable has no such conversion

    return convert


def patch_optimizer_assign(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces the methods with which an optimizer assigns to its own variables, such as Nadam's."""
    optimizer = module.TFOptimizer
    assign = getattr(optimizer, "assign", None)
    if assign is None or mentions(assign, "merge_call"):
        yield unpatched("TFOptimizer.assign", fixed=assign is not None)
        return

    @functools.wraps(assign)
    def assign_once(self: Any, variable: Any, value: Any) -> None:
        on_device = getattr(variable, "value", variable)
        if find_shared_context(trainer) is not None and isinstance(on_device, _get(_AGGREGATING_VARIABLE)):
            variable.assign(trainer.tf.cast(value, on_device.dtype))
        else:
            assign(self, variable, value)

    optimizer.assign = assign_once
    yield patched("TFOptimizer.assign")


def _patched_initialize(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def _initialize(self: Any, value: Any) -> None:
        strategy = tf.distribute.get_strategy()
        is_central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
        if is_central and strategy.num_replicas_in_sync > 1 and not isinstance(value, tf.Variable):
            if self.synchronization == "on_read":
                value = _make_copies(tf, strategy, self, value)
            elif tf.inside_function():
                # Inside a tf.function, the strategy searches this list with ==, which returns a tensor, not a bool.
                tf.compat.v1.get_default_graph().get_collection_ref("trainable_variables").clear()
        original(self, value)

    return _initialize


def _make_copies(tf: Any, strategy: Any, variable: Any, value: Any) -> Any:
    """A variable with a copy for each replica, which is reduced when it is read, as under MirroredStrategy."""
    copies: list[Any] = []
    for device in strategy.extended.worker_devices:
        with tf.device(device):
            copies.append(
                _get(_RESOURCE_VARIABLE)(  # tf.Variable would create the strategy's own kind of variable
                    value if not copies else copies[0].read_value(),
                    dtype=variable.dtype,
                    trainable=False,
                    name=variable.name,
                )
            )
    return _get(_SYNC_ON_READ_VARIABLE)(strategy, copies, variable._map_aggregation(variable.aggregation))


def _patched_assign(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def _direct_assign(self: Any, value: Any) -> None:
        variable = self._value
        context = find_shared_context(trainer)
        if (
            context is None
            or not isinstance(variable, _get(_AGGREGATING_VARIABLE))
            or variable.aggregation != tf.VariableAggregation.NONE
        ):
            original(self, value)
            return
        # The first replica's value counts, as when a variable with a copy for each replica is saved.
        value = tf.cast(value, variable.dtype)
        if can_merge(trainer):
            context.merge_call(
                lambda strategy, value: strategy.extended.update(variable, lambda v, new: v.assign(new), args=(value,)),
                args=(value,),
            )
        elif context._replica_id == 0:  # inside a condition, where a merge call is not possible
            variable.get().assign(value)

    return _direct_assign


def _get(name: tuple[str, str]) -> Any:
    """A private class of TensorFlow; if it no longer exists, a class without instances."""
    module, attribute = name
    return getattr(sys.modules.get(module), attribute, _Gone)


class _Gone:
    pass
