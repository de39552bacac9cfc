"""Keras 3's `model.fit` under MultiWorkerMirroredStrategy: which faults the patch finds and replaces.

These tests need no TensorFlow: they patch small packages that are written like Keras. `tests/training/keras/` trains
with the patch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from worker_entry.hooks import built_strategy, import_hooks
from worker_entry.keras_patches import layers, losses, metrics, optimizers, patching, source, variables
from worker_entry.keras_patches import seeds as seed_patches
from worker_entry.keras_patches import trainer as keras_trainer
from worker_entry.keras_patches.servers import parameter_server
from worker_entry.protocol.values import KerasPatch

# --- Without TensorFlow: detection -----------------------------------------------------------------------


FAULTY_TRAINER = """
    class TensorFlowTrainer:
        train_function = test_function = None

        @property
        def distribute_strategy(self):
            return self._distribute_strategy

        def _maybe_symbolic_build(self, iterator=None, data_batch=None):
            for _, _, batches in iterator or ():
                data_batch = next(batches)
                if isinstance(data_batch, DistributedValues):
                    data_batch = self._distribute_strategy.reduce("MEAN", data_batch, axis=None)
            self.built_with = data_batch

        def _make_function(self, step_function):
            def one_step_on_data(data):
                return step_function(data)

            if not self.run_eagerly:
                one_step_on_data = tf.function(one_step_on_data, reduce_retracing=True)

            def multi_step_on_iterator(iterator):
                return tf.while_loop(one_step_on_data, iterator)

            if not self.run_eagerly:
                multi_step_on_iterator = tf.function(multi_step_on_iterator, reduce_retracing=True)

            def function(iterator):
                return multi_step_on_iterator  # to be looked at

            return function

        def make_predict_function(self, force=False):
            self.predict_function = lambda data: ("predicted", data)

        def predict(self, x):
            return self.predict_function(x)

        def predict_on_batch(self, x):
            return self.predict_function([(x,)])

        def _aggregate_additional_loss(self, loss):
            return loss

    class TFEpochIterator:
        def _get_iterator(self):
            return self._distributed_dataset

    def reduce_per_replica(values, strategy, reduction):
        if reduction == "concat":
            return "concatenated"
        return strategy.reduce("MEAN", values, axis=0)
"""
FIXED_TRAINER = """
    class TensorFlowTrainer:
        def predict_on_batch(self, x):
            return self.predict_function(self.distribute_strategy.experimental_distribute_values_from_function(x))

        def _maybe_symbolic_build(self, iterator=None, data_batch=None):
            self.built_with = iterator.element_spec

        def _make_function(self, step_function):
            def one_step_on_data(data):
                return step_function(data)

            return tf.function(lambda iterator: tf.while_loop(one_step_on_data, iterator))

        def _aggregate_additional_loss(self, loss):
            return loss

    def reduce_per_replica(values, strategy, reduction):
        return strategy.reduce("MEAN", values, axis=None)
"""
TRAINER_HEAD = """
    import types

    class DistributedValues:
        pass

    class Iterator:
        pass

    tf = types.SimpleNamespace(
        distribute=types.SimpleNamespace(DistributedValues=DistributedValues, DistributedIterator=Iterator),
        data=types.SimpleNamespace(Iterator=Iterator),
        OptionalSpec=type(None),
        executing_eagerly=lambda: False,
        function=lambda function, reduce_retracing: ("tf.function", function),
        while_loop=lambda step, data: ("while_loop", step, data),
    )
    tree = types.SimpleNamespace(map_structure=lambda function, value: function(value), flatten=lambda value: [value])

    def _collective_all_reduce_multi_worker(strategy):
        return strategy.workers > 1
"""
LAYER = """
    class Layer:
        def add_weight(self, name=None, aggregation={default!r}):
            return name, aggregation

    class BatchNormalization(Layer):
        def build(self):
            self.gamma = self.add_weight(name="gamma")
            self.moving_mean = self.add_weight(name="moving_mean"{aggregation})

        def call(self, inputs):
            return {call}

        def _moments(self, inputs, mask):
            return ops.moments(inputs)
"""
FAULTY_LAYER = LAYER.format(default="none", aggregation="", call="self._moments(inputs)")
FIXED_LAYER = LAYER.format(
    default="none", aggregation=', aggregation="mean"', call="ops.cond(ops.size(inputs), self._moments)"
)
FAULTY_SCALER = """
    class LossScaleOptimizer:
        def apply(self, grads, trainable_variables=None):
            self.build(trainable_variables)

        def check_finite(self, grads):
            return ops.all(ops.isfinite(grads))
"""
FIXED_SCALER = """
    class LossScaleOptimizer:
        def apply(self, grads, trainable_variables=None):
            with tf.init_scope():
                self.build(trainable_variables)

        def check_finite(self, grads):
            return context.all_reduce("SUM", ops.all(ops.isfinite(grads)))
"""
OPTIMIZER = """
    class BaseOptimizer:
        def apply(self, grads, trainable_variables=None):
            {build}

        def _backend_apply_gradients(self, grads, trainable_variables):
            {apply}

        _apply_weight_decay = _backend_increment_gradient_accumulators = _backend_reset_gradient_accumulators = None
        _clip_gradients = _get_variable_index = _update_model_variables_moving_average = None

    class TFOptimizer(BaseOptimizer):
        def _backend_update_step(self, grads):
            {update}

        def _all_reduce_sum_gradients(self, grads):
            pass

        def assign(self, variable, value):
            {assign}

        _overwrite_model_variables_with_average_value = None
"""
FAULTY_OPTIMIZER = OPTIMIZER.format(
    build="self.build(trainable_variables)",
    apply="self._backend_update_step(self._clip_gradients(grads))",
    update="self._all_reduce_sum_gradients(grads)",
    assign="variable.assign(value)",
)
"""An optimizer that clips before it reduces."""
FAULTY_CONDITION = OPTIMIZER.format(
    build="tf.init_scope(self.build(trainable_variables))",
    apply="self._all_reduce_sum_gradients(ops.cond(should_overwrite_model_vars, self.overwrite))",
    update="pass",
    assign="context.merge_call(variable.assign)",
)
"""An optimizer that reduces first, and updates within a condition."""
FIXED_OPTIMIZER = OPTIMIZER.format(
    build="tf.init_scope(self.build(trainable_variables))",
    apply="self._clip_gradients(self._all_reduce_sum_gradients(grads))",
    update="pass",
    assign="context.merge_call(variable.assign)",
)
FAULTY_VARIABLE = """
    class Variable:
        synchronization = "auto"

        def __init__(self, value):
            self._initialize(value)

        def _deferred_initialize(self):
            pass

        def _initialize(self, value):
            self._value = tf.Variable(value, synchronization=self.synchronization)

        def _direct_assign(self, value):
            self._value.assign(value)

        def __float__(self):
            return float(self.value)
"""
FIXED_VARIABLE = """
    class Variable:
        def _deferred_initialize(self):
            pass

        def _initialize(self, value):
            self._value = make_for(tf.distribute.get_strategy(), value)

        def _direct_assign(self, value):
            context.merge_call(update, context.all_reduce("MEAN", value))

        def __float__(self):
            return float(self.numpy())
"""
FAULTY_LOSS = """
    def reduce_values(values, sample_weight=None, reduction="sum_over_batch_size"):
        return scale_loss_for_distribution(values)

    def scale_loss_for_distribution(value):
        return ops.multiply(value, 0.5)

    def unscale_loss_for_distribution(value):
        return ops.multiply(value, 2)
"""
FIXED_LOSS = "def scale_loss_for_distribution(value): ..."
METRIC = """
    class Metric:
        def add_variable(self, name):
            return backend.Variable(name=name, synchronization="on_read")

        def result(self):
            return self.total

    class Mean(Metric):
        def result(self):
            return self.total / self.count
"""
COMMON_TRAINER = """
    class Trainer:
        def _compute_loss(self, x=None):
            return x

        def get_metrics_result(self):
            return {results}
"""
FAULTY_RESULTS = COMMON_TRAINER.format(results="[metric.result() for metric in self.metrics]")
FIXED_RESULTS = COMMON_TRAINER.format(results="context.all_reduce(self.metrics)")
SEEDS = """
    class SeedGenerator:
        def next(self, ordered=True):
            return {seed}

    def global_seed_generator():
        return SeedGenerator()
"""
FAULTY_SEEDS = SEEDS.format(seed="self.state.value * 1")
FIXED_SEEDS = SEEDS.format(seed="fold_in(self.state.value, replica_id)")
OF_TRAINER = ["_maybe_symbolic_build", "make_predict_function", "reduce_per_replica", "_make_function"]
OF_LOSSES = ["scale_loss_for_distribution", "reduce_values", "_compute_loss", "_aggregate_additional_loss"]
OF_METRICS = ["Metric.result", "get_metrics_result"]
OF_SEEDS = ["SeedGenerator.next"]
OF_OTHERS = [
    "BatchNormalization.add_weight",
    "BatchNormalization._moments",
    "LossScaleOptimizer.apply",
    "LossScaleOptimizer.check_finite",
    "TFOptimizer.apply",
    "TFOptimizer._backend_apply_gradients",
    "Variable._initialize",
    "Variable._direct_assign",
    "Variable.__float__",
    "TFOptimizer.assign",
]
EVERYTHING = [*OF_TRAINER, *OF_LOSSES, *OF_METRICS, *OF_SEEDS, *OF_OTHERS]
FIXED = {
    "trainer": FIXED_TRAINER,
    "layer": FIXED_LAYER,
    "scaler": FIXED_SCALER,
    "optimizer": FIXED_OPTIMIZER,
    "variable": FIXED_VARIABLE,
    "loss": FIXED_LOSS,
    "results": FIXED_RESULTS,
    "seeds": FIXED_SEEDS,
}
"""The sources of a Keras without faults."""
CHANGED: list[tuple[dict[str, str], list[str]]] = [
    ({"trainer": FAULTY_TRAINER.replace("axis=0", "axis=AXIS")}, ["reduce_per_replica"]),
    ({"trainer": FAULTY_TRAINER.replace("next(batches)", "self._read(batches)")}, ["_maybe_symbolic_build"]),
    ({"trainer": FAULTY_TRAINER.replace("self.predict_function([(x,)])", "run(x)")}, ["make_predict_function"]),
    ({"trainer": FAULTY_TRAINER.replace("_aggregate_additional_loss", "_add")}, ["_aggregate_additional_loss"]),
    ({"loss": FAULTY_LOSS.replace("ops.multiply(value, 0.5)", "value / 2")}, OF_LOSSES),
    ({"results": FAULTY_RESULTS.replace("get_metrics_result", "compute_metrics")}, OF_METRICS),
    ({"seeds": FAULTY_SEEDS.replace("global_seed_generator", "shared_seed_generator")}, OF_SEEDS),
    ({"layer": FAULTY_LAYER.replace('name="moving_mean"', "**MEAN")}, ["BatchNormalization.add_weight"]),
    ({"layer": FAULTY_LAYER.replace("_moments", "_statistics")}, ["BatchNormalization._moments"]),
    ({"scaler": FAULTY_SCALER.replace("self.build", "self.create")}, ["LossScaleOptimizer.apply"]),
    ({"scaler": FAULTY_SCALER.replace("check_finite", "is_finite")}, ["LossScaleOptimizer.check_finite"]),
    ({"optimizer": FAULTY_OPTIMIZER.replace("_get_variable_index", "_find")}, ["TFOptimizer._backend_apply_gradients"]),
    ({"optimizer": FAULTY_OPTIMIZER.replace("def assign", "def set")}, ["TFOptimizer.assign"]),
    ({"variable": FAULTY_VARIABLE.replace("tf.Variable(", "make(")}, ["Variable._initialize"]),
    ({"variable": FAULTY_VARIABLE.replace("_direct_assign", "_set")}, ["Variable._direct_assign"]),
    ({"variable": FAULTY_VARIABLE.replace("__float__", "__complex__")}, ["Variable.__float__"]),
]
"""Sources of a Keras that has its faults in another way, each with the places that are then unknown."""


def write_module(folder: Path, name: str, source: str) -> None:
    """Writes a module and the packages around it."""
    *packages, last = name.split(".")
    for package in packages:
        folder /= package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (folder / f"{last}.py").write_text(textwrap.dedent(source))


WriteKeras = Callable[..., None]


@pytest.fixture
def write_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteKeras]:
    """Writes a package `keras` that can be imported, with the modules that the patch inspects."""

    def forget_keras() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "keras"]:
            monkeypatch.delitem(sys.modules, name)

    def write(
        trainer: str = FAULTY_TRAINER,
        layer: str = FAULTY_LAYER,
        scaler: str = FAULTY_SCALER,
        optimizer: str = FAULTY_OPTIMIZER,
        variable: str = FAULTY_VARIABLE,
        loss: str = FAULTY_LOSS,
        metric: str = METRIC,
        results: str = FAULTY_RESULTS,
        seeds: str = FAULTY_SEEDS,
        version: str = "3.99.0",
        newer_names: bool = False,
    ) -> None:
        modules = {
            "keras.src.version": f'__version__ = "{version}"',
            keras_trainer.TRAINER: textwrap.dedent(TRAINER_HEAD) + textwrap.dedent(trainer),
            layers.BATCH_NORMALIZATION: layer,
            optimizers.LOSS_SCALE_OPTIMIZER: scaler,
            optimizers.OPTIMIZER: optimizer,
            variables.VARIABLE: variable,
            losses.LOSS: loss,
            patching.METRIC: metric,
            metrics.STATELESS_SCOPE: "",
            source.COMMON_TRAINER: results,
            seed_patches.SEED_GENERATOR: seeds,
        }
        if newer_names:
            modules = {source.RENAMED.get(name, name): text for name, text in modules.items()}
            modules[keras_trainer.TRAINER] = modules[keras_trainer.TRAINER].replace("TensorFlowTrainer", "Trainer")
            modules[source.COMMON_TRAINER] = results.replace("class Trainer", "class BaseTrainer")
        for name, text in modules.items():
            write_module(tmp_path, name, text)
        # The other patches need more of Keras than is written here; `tests/training/keras/` shows them.
        known = [patch for patch in patching.PATCHES if {patch[0], source.RENAMED.get(patch[0])} & {*modules}]
        monkeypatch.setattr(patching, "PATCHES", known)
        imports = "".join(f"import {name}\n" for name in modules)
        (tmp_path / "keras" / "__init__.py").write_text(imports)
        importlib.invalidate_caches()

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    forget_keras()
    yield write
    forget_keras()


def import_patched() -> tuple[ModuleType, list[str]]:
    """Imports the written Keras with the patch installed; returns its trainer and the log lines."""
    lines: list[str] = []
    patching.install(lines.append)
    importlib.import_module("keras")
    return sys.modules[keras_trainer.TRAINER], lines


def test_the_keras_version_and_the_number_of_patches_are_reported(write_keras: WriteKeras) -> None:
    write_keras()
    told: list[KerasPatch] = []
    patching.install(lambda _: None, told.append)
    importlib.import_module("keras")
    assert told == [KerasPatch("3.99.0", len(EVERYTHING))]


@pytest.mark.parametrize(("sources", "places"), CHANGED)
def test_a_place_with_neither_fault_nor_fix_is_reported_as_changed_and_not_patched(
    write_keras: WriteKeras, sources: dict[str, str], places: list[str]
) -> None:
    write_keras(**sources)
    told: list[KerasPatch] = []
    lines: list[str] = []
    patching.install(lines.append, told.append)
    importlib.import_module("keras")
    assert told == [KerasPatch("3.99.0", len(EVERYTHING) - len(places), places)]
    patched, changed = lines
    assert f": {', '.join(without(*places))} (" in patched
    assert changed == (
        "Keras 3.99.0 has changed this code, so it is not patched, and training may fail or be wrong: "
        + ", ".join(places)
    )


def test_a_missing_module_of_keras_is_reported_as_changed(write_keras: WriteKeras, tmp_path: Path) -> None:
    write_keras()
    package = tmp_path / "keras" / "__init__.py"
    package.write_text(package.read_text().replace(f"import {layers.BATCH_NORMALIZATION}\n", ""))
    _, (_, changed) = import_patched()
    assert changed.endswith(f": {layers.BATCH_NORMALIZATION}")


def test_no_keras_patch_is_reported_if_nothing_was_patched(write_keras: WriteKeras) -> None:
    write_keras(**FIXED)
    told: list[KerasPatch] = []
    patching.install(lambda _: None, told.append)
    importlib.import_module("keras")
    assert told == []


def finders() -> list[Any]:
    return [finder for finder in sys.meta_path if type(finder).__module__ == import_hooks.__name__]


def without(*fixed: str) -> list[str]:
    return [name for name in EVERYTHING if name not in fixed]


def test_faulty_keras_code_is_patched_and_listed_in_one_log_line(write_keras: WriteKeras) -> None:
    write_keras()
    _, lines = import_patched()
    off = "(--set keras.patch=false turns this off)"
    assert lines == [f"patched Keras 3.99.0 for distributed training: {', '.join(EVERYTHING)} {off}"]


def test_faulty_keras_code_is_patched_under_its_newer_names_as_well(write_keras: WriteKeras) -> None:
    write_keras(newer_names=True)
    _, (line,) = import_patched()
    assert f": {', '.join(EVERYTHING)} (" in line


def test_keras_code_that_upstream_has_fixed_is_not_patched(write_keras: WriteKeras) -> None:
    write_keras(**FIXED)
    trainer, lines = import_patched()
    assert lines == ["Keras 3.99.0 needs no patch for distributed training"]
    functions = [
        trainer.reduce_per_replica,
        *vars(trainer.TensorFlowTrainer).values(),
        *vars(sys.modules[layers.BATCH_NORMALIZATION].BatchNormalization).values(),
        *vars(sys.modules[optimizers.LOSS_SCALE_OPTIMIZER].LossScaleOptimizer).values(),
        *vars(sys.modules[optimizers.OPTIMIZER].TFOptimizer).values(),
    ]
    assert not [function for function in functions if hasattr(function, "__wrapped__")]


@pytest.mark.parametrize(
    ("sources", "fixed"),
    [
        ({"trainer": FIXED_TRAINER}, OF_TRAINER[:3]),
        ({"loss": FIXED_LOSS}, OF_LOSSES),
        ({"results": FIXED_RESULTS}, OF_METRICS),
        ({"seeds": FIXED_SEEDS}, OF_SEEDS),
        ({"layer": FIXED_LAYER}, OF_OTHERS[:2]),
        ({"scaler": FIXED_SCALER}, OF_OTHERS[2:4]),
        ({"optimizer": FIXED_OPTIMIZER}, [*OF_OTHERS[4:6], "TFOptimizer.assign"]),
        ({"optimizer": FAULTY_CONDITION}, ["TFOptimizer.apply", "TFOptimizer.assign"]),
        ({"variable": FIXED_VARIABLE}, OF_OTHERS[6:9]),
    ],
    ids=["trainer", "loss", "metrics", "seeds", "layer", "scaling", "optimizer", "optimizer's condition", "variable"],
)
def test_only_the_remaining_keras_faults_are_patched_and_the_log_names_the_fixed_ones(
    write_keras: WriteKeras, sources: dict[str, str], fixed: list[str]
) -> None:
    write_keras(**sources)
    _, (patched, others) = import_patched()
    assert f": {', '.join(without(*fixed))} (" in patched
    assert others == f"Keras 3.99.0 no longer has the faults of {', '.join(fixed)}, which need no patch"


def test_keras_weights_with_mean_aggregation_by_default_are_not_patched(write_keras: WriteKeras) -> None:
    """In older versions of Keras, a layer's weights are averaged by default."""
    write_keras(layer=LAYER.format(default="mean", aggregation="", call="self._moments(inputs)"))
    _, (patched, fixed) = import_patched()
    assert "BatchNormalization._moments" in patched
    assert "add_weight" not in patched
    assert "BatchNormalization.add_weight" in fixed


@pytest.mark.parametrize(
    "sources",
    [{"loss": FAULTY_LOSS.replace("scale_", "other_")}, {"metric": METRIC.replace(', synchronization="on_read"', "")}],
    ids=["gradients are summed", "metrics do not cover the whole batch"],
)
def test_keras_versions_that_train_wrongly_even_with_patches_are_not_patched(
    write_keras: WriteKeras, sources: dict[str, str]
) -> None:
    """Keras before 3.8, and Keras before 3.10: an error is better than a wrong model."""
    write_keras(version="3.9.2", **sources)
    trainer, (line,) = import_patched()
    assert line == "Keras 3.9.2 is not patched: it would train wrongly even with patches; use Keras 3.10 or later"
    assert not hasattr(trainer.reduce_per_replica, "__wrapped__")


@pytest.mark.parametrize("version", ["3.99.0", "4.0.0", "10.1"])
def test_a_newer_keras_with_another_kind_of_losses_or_metrics_is_reported_as_changed(
    write_keras: WriteKeras, version: str
) -> None:
    write_keras(version=version, metric=METRIC.replace(', synchronization="on_read"', ""))
    told: list[KerasPatch] = []
    lines: list[str] = []
    patching.install(lines.append, told.append)
    importlib.import_module("keras")
    assert told == [KerasPatch(version, 0, [losses.LOSS, patching.METRIC])]
    assert [line.partition(": ")[0] for line in lines] == [
        f"Keras {version} has changed this code, so it is not patched, and training may fail or be wrong"
    ]
    assert not hasattr(sys.modules[keras_trainer.TRAINER].reduce_per_replica, "__wrapped__")


def test_the_import_hook_waits_until_the_program_imports_keras(write_keras: WriteKeras) -> None:
    write_keras()
    lines: list[str] = []
    patching.install(lines.append)
    importlib.import_module("json.tool")
    assert finders()
    assert "keras" not in sys.modules
    assert lines == []


def test_the_import_hook_is_removed_after_the_import_of_keras(write_keras: WriteKeras) -> None:
    write_keras()
    import_patched()
    assert finders() == []


def test_the_import_hook_survives_find_spec_for_keras(write_keras: WriteKeras) -> None:
    write_keras()
    lines: list[str] = []
    patching.install(lines.append)
    assert importlib.util.find_spec("keras") is not None
    importlib.import_module("keras")
    assert len(lines) == 1
    assert finders() == []


def test_keras_that_is_already_imported_is_patched_immediately(write_keras: WriteKeras) -> None:
    write_keras()
    importlib.import_module("keras")
    lines: list[str] = []
    patching.install(lines.append)
    assert "patched Keras 3.99.0" in lines[0]
    assert finders() == []


def test_a_failed_inspection_of_one_module_prevents_no_other_keras_patch(write_keras: WriteKeras) -> None:
    write_keras(layer="BatchNormalization = None")
    _, (problem, patched, changed) = import_patched()
    assert problem.startswith(f"could not inspect {layers.BATCH_NORMALIZATION} of Keras 3.99.0, which runs unpatched (")
    assert changed.endswith(f": {layers.BATCH_NORMALIZATION}")
    assert patched.endswith(f": {', '.join(without(*OF_OTHERS[:2]))} (--set keras.patch=false turns this off)")


def test_keras_that_cannot_be_inspected_is_imported_unpatched(write_keras: WriteKeras) -> None:
    write_keras(metric="Metric = None")
    trainer, (line,) = import_patched()
    assert line.startswith("could not inspect Keras 3.99.0, which runs unpatched (")
    assert not hasattr(trainer.reduce_per_replica, "__wrapped__")


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_single_process_is_patched_when_it_creates_a_multi_replica_strategy(
    write_keras: WriteKeras, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    class Strategy:
        def __init__(self, replicas: int) -> None:
            self.num_replicas_in_sync = replicas

    strategies = ModuleType("strategies")
    vars(strategies)["StrategyBase"] = Strategy
    monkeypatch.setitem(sys.modules, built_strategy.STRATEGIES, strategies)
    write_keras()
    lines: list[str] = []
    patching.install(lines.append, cluster=False)
    importlib.import_module("keras")
    assert lines == []
    for _ in range(2):
        assert Strategy(replicas).num_replicas_in_sync == replicas
    assert [line[:20] for line in lines] == ["patched Keras 3.99.0"] * (replicas - 1)


def test_keras_without_the_tensorflow_trainer_is_not_patched(tmp_path: Path, write_keras: WriteKeras) -> None:
    """Keras 2, or Keras 3 on JAX or PyTorch."""
    write_keras()
    (tmp_path / "keras" / "__init__.py").write_text("import keras.src.version")
    lines: list[str] = []
    patching.install(lines.append)
    importlib.import_module("keras")
    assert lines == []


class FakeStrategy:
    def __init__(self, workers: int) -> None:
        self.workers = self.num_replicas_in_sync = workers

    def reduce(self, reduction: str, value: Any, axis: int | None) -> Any:
        return reduction, value, axis

    def experimental_local_results(self, value: Any) -> list[str]:
        return ["first local", "second local"]


class Unread:
    """An epoch iterator whose data cannot be read twice."""

    def __init__(self, spec: Any) -> None:
        self._distributed_dataset = SimpleNamespace(element_spec=spec)


Spec = functools.partial(SimpleNamespace, shape=SimpleNamespace(rank=2))


def test_the_patched_trainer_builds_a_model_without_reading_data(write_keras: WriteKeras) -> None:
    write_keras()
    trainer, _ = import_patched()
    model = trainer.TensorFlowTrainer()
    model._distribute_strategy = FakeStrategy(2)
    of_replica = Spec()
    model._maybe_symbolic_build(iterator=Unread(SimpleNamespace(_value_specs=(of_replica, Spec()))))
    assert model.built_with is of_replica


def test_the_patched_trainer_builds_no_model_from_data_of_unknown_rank(write_keras: WriteKeras) -> None:
    write_keras()
    trainer, _ = import_patched()
    model = trainer.TensorFlowTrainer()
    model._distribute_strategy = FakeStrategy(2)
    model._maybe_symbolic_build(iterator=Unread(SimpleNamespace(shape=SimpleNamespace(rank=None))))
    assert not hasattr(model, "built_with")


@pytest.mark.parametrize("reduction", ["auto", "mean"])
def test_log_values_of_several_workers_are_averaged_only_over_replicas(write_keras: WriteKeras, reduction: str) -> None:
    write_keras()
    trainer, _ = import_patched()
    assert trainer.reduce_per_replica(1.5, FakeStrategy(2), reduction) == ("MEAN", 1.5, None)


def test_reduce_per_replica_is_unchanged_for_one_worker_and_other_reductions(write_keras: WriteKeras) -> None:
    write_keras()
    trainer, _ = import_patched()
    assert trainer.reduce_per_replica(1.5, FakeStrategy(1), "auto") == ("MEAN", 1.5, 0)
    assert trainer.reduce_per_replica(1.5, FakeStrategy(2), "concat") == "concatenated"


@pytest.mark.parametrize(
    ("workers", "steps", "step_has_own_function"),
    [(2, 4, False), (2, 1, True), (1, 4, True)],
    ids=["two workers, several steps", "two workers, one step", "one worker"],
)
def test_a_train_step_loses_its_tf_function_only_with_several_workers_and_steps(
    write_keras: WriteKeras, workers: int, steps: int, step_has_own_function: bool
) -> None:
    write_keras()
    trainer, _ = import_patched()
    model = trainer.TensorFlowTrainer()
    model.steps_per_execution, model.run_eagerly, model.jit_compile = steps, False, False
    model._distribute_strategy = FakeStrategy(workers)

    function = model._make_function(print)
    loop_kind, loop = function(trainer.Iterator())
    _, step, data = loop("data")

    assert loop_kind == "tf.function"
    assert data == "data"
    assert isinstance(step, tuple) == step_has_own_function
    assert model.run_eagerly is False


def fit_of_keras_3_10(epoch_iterator: Any) -> None:
    for step, iterator in epoch_iterator:
        print(step, iterator)


def fit_of_newer_keras(epoch_iterator: Any) -> None:
    for begin_step, end_step, iterator in epoch_iterator:
        print(begin_step, end_step, iterator)


def test_steps_on_workers_have_the_numbers_that_this_version_of_keras_expects() -> None:
    expects = [parameter_server._expects_last(fit) for fit in (fit_of_keras_3_10, fit_of_newer_keras)]
    assert expects == [False, True]


def test_only_moving_statistics_of_batch_normalization_get_an_aggregation(write_keras: WriteKeras) -> None:
    write_keras()
    import_patched()
    layer = sys.modules[layers.BATCH_NORMALIZATION].BatchNormalization()
    layer.build()
    assert layer.gamma == ("gamma", "none")
    assert layer.moving_mean == ("moving_mean", "mean")


# --- Looking at functions ---------------------------------------------------------------------------------


def _outer(values: Any) -> Any:
    size = values.shape

    def inner() -> Any:
        return values.where(size, axis=0)

    return inner


def test_the_calls_and_names_of_an_inner_function_count_as_those_of_the_outer() -> None:
    wrapped = functools.wraps(_outer)(lambda *_: None)
    for function in (_outer, wrapped):
        assert [call.keywords[0].arg for call in source.calls_of(function, "where")] == ["axis"]
        assert source.mentions(function, "where")
        assert not source.mentions(function, "size")


def test_an_attribute_that_is_only_read_is_mentioned_but_not_called() -> None:
    assert source.mentions(_outer, "shape")
    assert source.calls_of(_outer, "shape") == []
