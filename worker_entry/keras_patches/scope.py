"""Gives a strategy the objects of its model that a program has created outside of the strategy's scope.

A model takes layers, and `compile` takes an optimizer and metrics, that were created anywhere. Then the metrics of each
worker count its own samples only, and differ; the replicas of one process share a layer's state, and each of them
changes it. With such weights, or such an optimizer, `fit` fails; tf_keras refuses some of these, and allows others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def move_into_scope(trainer: Any, model: Any) -> None:
    """Creates the variables of model, metrics and optimizer again, in the strategy's scope, if they are not there."""
    tf = trainer.tf
    if not tf.executing_eagerly() or model.distribute_strategy.num_replicas_in_sync == 1:
        return
    strategy = model.distribute_strategy
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
