"""Makes Keras 3's `model.fit` work under MultiWorkerMirroredStrategy, from outside.

With more than one worker, Keras 3 fails in its trainer (tensorflow#72388, keras#20585, keras#21172), before
the first step:

- `TensorFlowTrainer._maybe_symbolic_build` hands a *tuple* of distributed values to `strategy.reduce`,
  which takes one value, to get a sample batch. One replica's part of the batch is all it needs.
- `reduce_per_replica` asks for the mean over axis 0 of every log value. The values are scalars, which
  have no axis 0: what is meant is the mean across the replicas.
- `TensorFlowTrainer._make_function` calls a tf.function inside a tf.while_loop if `steps_per_execution` is
  more than 1. A collective inside gets its key as an input of that function, and TensorFlow does not feed
  such inputs through control flow. The step has to be traced in the loop itself.
- `BaseOptimizer._backend_apply_gradients` updates variables within a condition if `gradient_accumulation_steps` is
  given; where replicas have to meet for that, TensorFlow refuses it. They meet before it: gradients are reduced each
  time, so that what is accumulated is the same on all, and the condition is one of all replicas together.

Behind that, it trains wrongly at two places, as it would have done all the time (and at a third, `keras_backup`):

- `BatchNormalization` no longer averages its moving statistics over the replicas (tf_keras does, and so did
  Keras up to 3.7), so that every worker evaluates and saves another model; and a worker that gets no sample of
  an uneven last batch turns the model into NaN, by its moments of nothing.
- `LossScaleOptimizer` (mixed_float16) looks for infinite gradients before they are reduced, so that one
  worker skips a step whose collectives the others wait for, for ever.

All is mended once Keras has been imported, and only where the faulty code is found, so that nothing happens
where Keras has mended it itself. A Keras that fails in some new way is left as it is. So is one before 3.10,
which would only go from failing to training wrongly: up to 3.7 it adds the workers' gradients up where it should
average them, and up to 3.9 its metrics are not those of the whole batch.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Optional

from worker_entry.after_import import after_import
from worker_entry.keras_backup import BACKUP, mend_backup
from worker_entry.keras_parameter_server import EPOCH_ITERATOR, mend_parameter_server

KERAS = "keras"
TRAINER = "keras.src.backend.tensorflow.trainer"
BATCH_NORMALIZATION = "keras.src.layers.normalization.batch_normalization"
OPTIMIZER = "keras.src.optimizers.base_optimizer"
LOSS_SCALE_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer"
LOSS = "keras.src.losses.loss"
METRIC = "keras.src.metrics.metric"

Log = Callable[[str], None]


def install(log: Log) -> None:
    """Mends Keras when it is imported, or now if it has been; `log` gets one line that says what was done."""
    after_import(KERAS, lambda _: _mend_and_log(log))


def _mend_and_log(log: Log) -> None:
    trainer = sys.modules.get(TRAINER)
    if trainer is None:  # Keras 2, or Keras 3 on another backend
        return
    keras = f"Keras {getattr(sys.modules.get('keras.src.version'), '__version__', '(version unknown)')}"
    try:
        sound = _averages_over_workers()
    except Exception as error:  # noqa: BLE001 - a mend that fails must not fail the user's import of Keras
        log(f"could not look at {keras} to mend it ({error!r}); it runs as it is")
        return
    if not sound:
        log(f"{keras} is not mended, for it would train wrongly on several workers; 3.10 or later would not")
        return
    mended: list[str] = []
    unclear = False
    for name, mend in MENDS.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            mended += mend(trainer, module)
        except Exception as error:  # noqa: BLE001 - as above
            unclear = True
            log(f"could not look at {keras} to mend {name} ({error!r}); it runs as it is")
    if mended:
        log(f"mended {keras} for multi-worker training: {', '.join(mended)} (--no-keras-mend turns this off)")
    elif not unclear:
        log(f"{keras} needs no mend for multi-worker training")


def _averages_over_workers() -> bool:
    """Whether Keras divides the loss by the number of replicas, and sums its metrics over them when it reads them."""
    metric: Any = getattr(sys.modules.get(METRIC), "Metric", None)
    return hasattr(sys.modules.get(LOSS), "scale_loss_for_distribution") and any(
        keyword.arg == "synchronization" and _is_constant(keyword.value, "on_read")
        for call in _calls(metric.add_variable, "Variable")
        for keyword in call.keywords
    )


def mend_trainer(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in the trainer's module (both arguments); returns the names of what it replaced."""
    mended = []
    trainer_class = module.TensorFlowTrainer
    build = getattr(trainer_class, "_maybe_symbolic_build", None)
    if build is not None and _calls_reduce(build, reduction="MEAN", axis=None):
        trainer_class._maybe_symbolic_build = _mended_build(trainer, build)
        mended.append("_maybe_symbolic_build")
    reduce = module.reduce_per_replica
    if _calls_reduce(reduce, reduction="MEAN", axis=0):
        module.reduce_per_replica = _mended_reduce(trainer, reduce)
        mended.append("reduce_per_replica")
    make = getattr(trainer_class, "_make_function", None)
    if make is not None and _calls_function_in_loop(make):
        trainer_class._make_function = _mended_make_function(trainer, make)
        mended.append("_make_function")
    return mended


def mend_batch_normalization(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in the layer; returns the names of what it replaced."""
    mended = []
    layer = module.BatchNormalization
    if _leaves_statistics_apart(layer):
        layer.add_weight = _mended_add_weight(layer.add_weight)
        mended.append("BatchNormalization.add_weight")
    moments = getattr(layer, "_moments", None)
    if moments is not None and not any(_calls(layer.call, name) for name in ("cond", "where", "shape", "size")):
        layer._moments = _mended_moments(trainer, moments)
        mended.append("BatchNormalization._moments")
    return mended


def mend_optimizer(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in all optimizers' base; returns the names of what it replaced."""
    optimizer = module.BaseOptimizer
    apply = getattr(optimizer, "_backend_apply_gradients", None)
    if apply is None or not _updates_in_condition(apply):
        return []
    optimizer._backend_apply_gradients = _mended_apply(trainer, apply)
    return ["BaseOptimizer._backend_apply_gradients"]


def mend_loss_scale_optimizer(trainer: Any, module: Any) -> list[str]:
    """Replaces what is faulty in the optimizer; returns the names of what it replaced."""
    optimizer = module.LossScaleOptimizer
    check = getattr(optimizer, "check_finite", None)
    if check is None or _calls(check, "all_reduce"):
        return []
    optimizer.check_finite = _mended_check_finite(trainer, check)
    return ["LossScaleOptimizer.check_finite"]


MENDS = {
    TRAINER: mend_trainer,
    BATCH_NORMALIZATION: mend_batch_normalization,
    LOSS_SCALE_OPTIMIZER: mend_loss_scale_optimizer,
    OPTIMIZER: mend_optimizer,
    BACKUP: mend_backup,
    EPOCH_ITERATOR: mend_parameter_server,
}
"""What looks at which module of Keras."""


def _mended_build(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self._distribute_strategy
        if iterator is not None and strategy is not None and _is_multi_worker(trainer, strategy):
            iterator = _LocalBatches(trainer, strategy, iterator)
        original(self, iterator=iterator, data_batch=data_batch)

    return _maybe_symbolic_build


class _LocalBatches:
    """An epoch iterator of Keras that gives the first local replica's part of each batch."""

    def __init__(self, trainer: Any, strategy: Any, iterator: Any) -> None:
        self._trainer = trainer
        self._strategy = strategy
        self._iterator = iterator

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        map_structure = self._trainer.tree.map_structure
        for *numbers, batches in self._iterator:
            yield (*numbers, (map_structure(self._first_local, batch) for batch in batches))

    def _first_local(self, value: Any) -> Any:
        if isinstance(value, self._trainer.tf.distribute.DistributedValues):
            return self._strategy.experimental_local_results(value)[0]
        return value


def _mended_reduce(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        # "auto" means "mean" here: Keras chooses otherwise for TPUs only.
        if reduction in ("auto", "mean") and _is_multi_worker(trainer, strategy):
            return trainer.tree.map_structure(lambda v: strategy.reduce("MEAN", v, axis=None), values)
        return original(values, strategy, reduction)

    return reduce_per_replica


def _mended_make_function(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _make_function(self: Any, step_function: Callable[..., Any]) -> Any:
        in_loop = self.steps_per_execution > 1 and not (self.run_eagerly or self.jit_compile)
        if not in_loop or not _is_multi_worker(trainer, self.distribute_strategy):
            return original(self, step_function)
        # Keras leaves out all its tf.functions, and the outer one, around the loop, is put back.
        self.run_eagerly = True
        try:
            function = original(self, step_function)
        finally:
            self.run_eagerly = False
        cell = function.__closure__[function.__code__.co_freevars.index("multi_step_on_iterator")]
        cell.cell_contents = trainer.tf.function(cell.cell_contents, reduce_retracing=True)
        return function

    return _make_function


def _mended_add_weight(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_weight(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("name")).startswith(("moving_", "renorm_")):
            kwargs.setdefault("aggregation", "mean")
        return original(self, *args, **kwargs)

    return add_weight


def _mended_moments(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    tf = trainer.tf

    @functools.wraps(original)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        mean, variance = original(self, inputs, mask)
        if self.synchronized or not _is_multi_worker(trainer, tf.distribute.get_strategy()):
            return mean, variance
        # No sample has no moments; with the moving ones in their place, these stay what they are.
        empty = tf.equal(tf.size(inputs), 0)
        return (
            tf.where(empty, tf.cast(self.moving_mean, mean.dtype), mean),
            tf.where(empty, tf.cast(self.moving_variance, variance.dtype), variance),
        )

    return _moments


def _mended_check_finite(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    tf = trainer.tf

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        context = tf.distribute.get_replica_context()
        if context is None or not _is_multi_worker(trainer, context.strategy):
            return finite
        return tf.equal(context.all_reduce("SUM", tf.cast(tf.logical_not(finite), "float32")), 0)

    return check_finite


def _mended_apply(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    tf = trainer.tf

    @functools.wraps(original)
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> None:
        context = tf.distribute.get_replica_context()
        if not self.gradient_accumulation_steps or context is None or not _is_multi_worker(trainer, context.strategy):
            original(self, grads, trainable_variables)
            return
        interim = tf.__internal__.distribute.interim

        def apply_together(_: Any, gradients: Any) -> None:
            # Where all replicas have met already, what the original asks them to meet for is done at once.
            meet, interim.maybe_merge_call = interim.maybe_merge_call, lambda do, strategy, *rest: do(strategy, *rest)
            try:
                original(self, gradients, trainable_variables)
            finally:
                interim.maybe_merge_call = meet

        pairs = self._all_reduce_sum_gradients(list(zip(grads, trainable_variables)))  # noqa: B905 - Python 3.9 has no strict
        context.merge_call(apply_together, args=([gradient for gradient, _ in pairs],))

    return _backend_apply_gradients


def _is_multi_worker(trainer: Any, strategy: Any) -> bool:
    return bool(trainer._collective_all_reduce_multi_worker(strategy))


def _calls_reduce(function: Callable[..., Any], *, reduction: str, axis: Optional[int]) -> bool:
    """Whether the function's source has a call `….reduce(<reduction>, value, axis=<axis>)`."""
    return any(
        len(call.args) == 2
        and _is_constant(call.args[0], reduction)
        and any(keyword.arg == "axis" and _is_constant(keyword.value, axis) for keyword in call.keywords)
        for call in _calls(function, "reduce")
    )


def _calls_function_in_loop(make: Callable[..., Any]) -> bool:
    """Whether the source has `….while_loop(…)` and `….function(one_step_on_data, …)`."""
    return bool(_calls(make, "while_loop")) and any(
        call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "one_step_on_data"
        for call in _calls(make, "function")
    )


def _updates_in_condition(apply: Callable[..., None]) -> bool:
    """Whether the source has `….cond(is_update_step, …)`, in which the optimizer reduces the gradients."""
    return any(
        call.args and isinstance(call.args[0], ast.Name) and call.args[0].id == "is_update_step"
        for call in _calls(apply, "cond")
    )


def _leaves_statistics_apart(layer: Any) -> bool:
    """Whether the layer's moving statistics are weights of no aggregation, neither named nor by default."""
    default = inspect.signature(layer.add_weight).parameters["aggregation"].default
    return default in (None, "none") and any(
        any(word.arg == "name" and _is_constant(word.value, "moving_mean") for word in call.keywords)
        and all(word.arg != "aggregation" for word in call.keywords)
        for call in _calls(layer.build, "add_weight")
    )


def _calls(function: Callable[..., Any], name: str) -> list[ast.Call]:
    """The calls `….name(…)` in the function's source."""
    return [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def _is_constant(node: ast.expr, value: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value == value
