"""Makes Keras 3's `fit` and `evaluate` work under ParameterServerStrategy, as in tf_keras.

Keras 3 does not support the cluster coordinator that this strategy needs: it iterates over the data in the chief, which
TensorFlow refuses ("create_per_worker_dataset"), and would run every step there. With this patch, the trainer gets

- data that each worker reads itself (`data`),
- train and test functions that schedule steps on workers, and metrics without lost updates (`steps`),
- the shapes for building a model from the dataset's element_spec, because the chief has no batch,
- a `predict` that runs in the chief, with the variables on the parameter servers,

and variables get

- `assign_add` and `assign_sub` that the server executes: Keras reads, computes and assigns, which loses steps of
  `optimizer.iterations` when two workers do so at once,
- one server each: Keras 3 cannot train a variable that a `variable_partitioner` has divided.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from worker_entry.keras_patches.findings import Finding, patched, unpatched
from worker_entry.keras_patches.servers.data import WorkerData
from worker_entry.keras_patches.servers.steps import StepFunction, Workers
from worker_entry.keras_patches.source import find_module, find_trainer, mentions, parse
from worker_entry.keras_patches.variables import VARIABLE

EPOCH_ITERATOR = "keras.src.trainers.epoch_iterator"
DATA_ADAPTERS = "keras.src.trainers.data_adapters"
REMOTE_VALUES = "tensorflow.python.distribute.coordinator.values"

_workers: weakref.WeakKeyDictionary[Any, Workers] = weakref.WeakKeyDictionary()


def patch_parameter_server(trainer: Any, module: Any, _: Any) -> Iterator[Finding]:
    """Replaces the parts of the trainer that fail."""
    place = "fit under ParameterServerStrategy"
    core = find_module(VARIABLE)
    if core is None or not _lacks_coordinator(trainer) or not _is_known(trainer, core):
        yield unpatched(place, fixed=not _lacks_coordinator(trainer))
        return
    trainer_class = find_trainer(trainer)
    trainer.TFEpochIterator = _patched_epoch_iterator(trainer, trainer.TFEpochIterator)
    trainer_class._maybe_symbolic_build = _patched_build(trainer_class._maybe_symbolic_build)
    trainer_class._make_function = _patched_make_function(trainer, trainer_class._make_function)
    trainer_class.predict = _in_chief(trainer.tf, trainer_class.predict)
    variable: Any = core.Variable
    variable.assign_add = _at_server(core, variable.assign_add, "assign_add")
    variable.assign_sub = _at_server(core, variable.assign_sub, "assign_sub")
    variable._initialize = _patched_initialize(trainer, variable._initialize)
    yield patched(place)


def _patched_epoch_iterator(trainer: Any, original: Any) -> Any:
    """Returns a class, not a function, because the iterator is used with isinstance."""
    with_last = _expects_last(find_trainer(trainer).fit)

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        strategy: Any = kwargs.get("distribute_strategy")
        if args or not _is_parameter_server(strategy):
            return object.__new__(cls)
        if strategy.num_replicas_in_sync > 1:
            raise ValueError("under ParameterServerStrategy, Keras 3 can use only one GPU per worker")
        del kwargs["distribute_strategy"]
        return WorkerData(
            trainer.tf,
            sys.modules[DATA_ADAPTERS].get_data_adapter,
            _workers_of(trainer.tf, strategy),
            trains="class_weight" in kwargs,
            with_last=with_last,
            steps=kwargs.pop("steps_per_epoch", None),
            **kwargs,
        )

    return type(original.__name__, (original,), {"__new__": make, "__module__": original.__module__})


def _patched_build(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if isinstance(iterator, WorkerData):
            iterator, data_batch = None, iterator.element_spec
        original(self, iterator=iterator, data_batch=data_batch)

    return _maybe_symbolic_build


def _patched_make_function(trainer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _make_function(self: Any, step_function: Callable[..., Any]) -> Any:
        function = original(self, step_function)
        strategy = self.distribute_strategy
        if not _is_parameter_server(strategy):
            return function
        if self.run_eagerly:
            raise ValueError("run_eagerly cannot be used under ParameterServerStrategy: workers only run graphs")
        if getattr(self.optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                "gradient_accumulation_steps cannot be used under ParameterServerStrategy: workers do not take turns"
            )
        convert = getattr(self, "_autoconvert_optionals", None)  # missing in Keras 3.11
        step = step_function if convert is None else convert(step_function)
        return StepFunction(trainer.tf, self, step, _workers_of(trainer.tf, strategy), function)

    return _make_function


def _in_chief(tf: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = self._distribute_strategy
        if not _is_parameter_server(strategy):
            return original(self, *args, **kwargs)
        if tf.distribute.has_strategy():
            raise ValueError("predict runs in the chief: call it outside of the scope of ParameterServerStrategy")
        self._distribute_strategy = None
        try:
            return original(self, *args, **kwargs)
        finally:
            self._distribute_strategy = strategy

    return predict


def _at_server(core: Any, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def assign(self: Any, value: Any) -> Any:
        on_server = self._value
        kind = type(on_server)
        # The module's other class, AggregatingVariable, belongs to central storage, whose replicas update together.
        is_on_server = kind.__module__.endswith(".ps_values") and kind.__name__ != "AggregatingVariable"
        if not is_on_server or core.in_stateless_scope():
            return original(self, value)
        getattr(on_server, name)(core.tf.cast(value, on_server.dtype))
        return on_server.value()

    return assign


def _patched_initialize(trainer: Any, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _initialize(self: Any, value: Any) -> None:
        strategy = trainer.tf.distribute.get_strategy()
        if not _is_parameter_server(strategy):
            original(self, value)
            return
        extended = strategy.extended
        partitioner, extended._variable_partitioner = extended._variable_partitioner, None
        try:
            original(self, value)
        finally:
            extended._variable_partitioner = partitioner

    return _initialize


def _workers_of(tf: Any, strategy: Any) -> Workers:
    if strategy not in _workers:
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        _workers[strategy] = Workers(coordinator, strategy._num_workers)
    return _workers[strategy]


def _is_parameter_server(strategy: Any) -> bool:
    return bool(getattr(strategy, "_should_use_with_coordinator", False))


def _lacks_coordinator(trainer: Any) -> bool:
    return "coordinator" not in inspect.getsource(trainer).lower()


def _is_known(trainer: Any, core: Any) -> bool:
    """Whether the trainer and TensorFlow's remote values have the methods that this module uses."""
    trainer_class = find_trainer(trainer)
    names = ("_maybe_symbolic_build", "_make_function", "_get_metrics_result_or_logs")
    remote: Any = sys.modules.get(REMOTE_VALUES)
    return (
        all(hasattr(trainer_class, name) for name in names)
        and all(hasattr(core.Variable, name) for name in ("_initialize", "_direct_assign"))
        and hasattr(core, "in_stateless_scope")
        and _passes_class_weight(trainer_class.fit)
        and not _passes_class_weight(trainer_class.evaluate)
        and hasattr(remote, "RemoteValueImpl")
        and mentions(remote.RemoteValueImpl.__init__, "_status_available_event")
    )


def _expects_last(fit: Callable[..., Any]) -> bool:
    """Whether the source has a loop over three values, of which the second is the number of the last step."""
    targets = (node.target for node in ast.walk(parse(fit)) if isinstance(node, ast.For))
    return any(isinstance(target, ast.Tuple) and len(target.elts) == 3 for target in targets)


def _passes_class_weight(function: Callable[..., Any]) -> bool:
    """Whether a `TFEpochIterator(…)` in the function's source has class weights, which only training data have."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "TFEpochIterator"
        and any(keyword.arg == "class_weight" for keyword in node.keywords)
        for node in ast.walk(parse(function))
    )
