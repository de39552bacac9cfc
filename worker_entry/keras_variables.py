"""Patches of Keras 3's variables under CentralStorageStrategy: see `keras_support` for the faults.

This strategy has one copy of each variable, which it updates in a meeting of the replicas. What Keras assigns is made for
variables of which each replica has its own copy: every replica may assign to it, also within a condition.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from worker_entry.keras_source import find_shared_context

VARIABLE = "keras.src.backend.tensorflow.core"


_DISTRIBUTED = "tensorflow.python.distribute.values"
_CENTRAL = "tensorflow.python.distribute.ps_values"
_RESOURCE = "tensorflow.python.ops.resource_variable_ops"


def mend_variable(trainer: Any, module: Any) -> list[str]:
    """Replaces what central storage cannot do with variables; returns the names of what it replaced."""
    variable = module.Variable
    if not all(hasattr(variable, name) for name in ("_initialize", "_direct_assign", "synchronization")):
        return []
    if not all(name in sys.modules for name in (_DISTRIBUTED, _CENTRAL, _RESOURCE)):
        return []
    variable._initialize = _mended_initialize(trainer, variable._initialize)
    variable._direct_assign = _mended_assign(trainer, variable._direct_assign)
    return ["Variable"]


def _mended_initialize(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def _initialize(self: Any, value: Any) -> None:
        strategy = tf.distribute.get_strategy()
        is_central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
        if is_central and strategy.num_replicas_in_sync > 1 and not isinstance(value, tf.Variable):
            if self.synchronization == "on_read":
                value = _make_copies(tf, strategy, self, value)
            elif tf.inside_function():
                # Here the strategy looks for the new variable by ==, which gives a tensor, not an answer.
                tf.compat.v1.get_default_graph().get_collection_ref("trainable_variables").clear()
        original(self, value)

    return _initialize


def _make_copies(tf: Any, strategy: Any, variable: Any, value: Any) -> Any:
    """A variable that each replica counts in by itself, and that is summed when it is read, as MirroredStrategy has."""
    copies: list[Any] = []
    for device in strategy.extended.worker_devices:
        with tf.device(device):
            copies.append(
                sys.modules[_RESOURCE].ResourceVariable(  # of which the strategy makes no variable of its own
                    value if not copies else copies[0].read_value(),
                    dtype=variable.dtype,
                    trainable=False,
                    name=variable.name,
                )
            )
    aggregation = variable._map_aggregation(variable.aggregation)
    return sys.modules[_DISTRIBUTED].SyncOnReadVariable(strategy, copies, aggregation)


def _mended_assign(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def _direct_assign(self: Any, value: Any) -> None:
        context = find_shared_context(trainer)
        variable = self._value
        if (
            context is None
            or not isinstance(variable, sys.modules[_CENTRAL].AggregatingVariable)
            or variable.aggregation != tf.VariableAggregation.NONE
        ):
            original(self, value)
            return
        # What the first replica assigns counts. It is what is saved of a variable of which each replica has its own.
        value = tf.cast(value, variable.dtype)
        if getattr(threading.current_thread(), "graph", None) is tf.compat.v1.get_default_graph():
            context.merge_call(
                lambda strategy, value: strategy.extended.update(variable, lambda v, new: v.assign(new), args=(value,)),
                args=(value,),
            )
        elif context._replica_id == 0:  # within a condition, where replicas cannot meet
            variable.get().assign(value)

    return _direct_assign
