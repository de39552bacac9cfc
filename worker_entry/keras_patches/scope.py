"""Moves a model's objects that were created outside of the strategy's scope into the scope.

A model takes layers from anywhere, and `compile` takes an optimizer and metrics from anywhere. If they come from
outside of the scope, each worker's metrics count only its own samples, the replicas of one process all change the same
layer state, and `fit` fails with such weights or such an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def move_into_scope(trainer: Any, model: Any) -> None:
    """Creates the variables of model, metrics and optimizer again, in the strategy's scope, if they are not there."""
    tf, strategy = trainer.tf, model.distribute_strategy
    if strategy.num_replicas_in_sync == 1 or not tf.executing_eagerly():
        return
    variables = [*model.variables, *model.metrics_variables]
    for optimizer in _optimizers(model):
        variables += optimizer.variables
        if hasattr(optimizer, "_distribution_strategy"):
            optimizer._distribution_strategy = strategy
    with strategy.scope():
        for variable in variables:
            if _is_outside(tf, strategy, variable._value):
                variable._initialize(variable._value.numpy())


def _optimizers(model: Any) -> Iterator[Any]:
    """The optimizer, and the one that it wraps."""
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def _is_outside(tf: Any, strategy: Any, value: Any) -> bool:
    return (
        isinstance(value, tf.Variable)
        and not isinstance(value, tf.distribute.DistributedValues)
        and not strategy.extended.variable_created_in_scope(value)
    )
