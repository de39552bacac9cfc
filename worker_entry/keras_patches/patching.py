"""Makes Keras 3 work under tf.distribute's synchronous strategies: applies the patches, and logs them.

With more than one worker, Keras 3 fails in its trainer (tensorflow#72388, keras#20585, keras#21172), before
the first step (`trainer`):

- To get a sample batch, `TensorFlowTrainer._maybe_symbolic_build` passes a *tuple* of distributed values to
  `strategy.reduce`, which takes one value. The specs of the data are enough (`reading`). It also calls the model even
  if the model has no `call`, such as a GAN, whose parts are built when its train_step is traced.
- `reduce_per_replica` computes the mean over axis 0 of every log value. The values are scalars, which have no axis 0;
  the mean across the replicas is what it needs.
- `TensorFlowTrainer._make_function` calls a tf.function inside a tf.while_loop if `steps_per_execution` is
  more than 1. A collective inside gets its key as an input of that function, and TensorFlow does not feed
  such inputs through control flow. The step has to be traced in the loop itself.

Its optimizers fail or train wrongly (`optimizers`):

- `_backend_apply_gradients` clips each replica's gradients before they are reduced. A single process clips those of the
  whole batch.
- It updates variables inside a condition if `gradient_accumulation_steps` or `ema_overwrite_frequency` is given.
  The update needs a merge call of all replicas, which TensorFlow does not allow inside a condition.
- `apply` creates the optimizer's variables in the graph of the first step. TensorFlow then runs this step inside a
  condition, where a collective gets no key. tf_keras creates them outside of the graph.
- `LossScaleOptimizer` (mixed_float16) checks for infinite gradients before they are reduced. So one worker skips a step
  while the others wait for ever for its part in the step's collectives.

Keras trains wrongly in more places:

- `losses`: a scalar loss is not divided by the number of replicas, and the value of each other loss is. Means
  over an empty batch are NaN.
- `metrics`: the logs of a batch are averages of each replica's own results.
- `seeds`: every replica draws the same random numbers.
- `layers`: `BatchNormalization` no longer averages its moving statistics over the replicas (tf_keras does, and so did
  Keras up to 3.7), so that every worker evaluates and saves a different model. And a replica that gets no sample of an
  uneven last batch computes the moments of an empty tensor, which turn the model into NaN.
- `layer_state`: the states of other layers are not averaged either.
- `scope`: layers, metrics and an optimizer that were created outside of the strategy's scope stay outside.
- `whole_batches`: `predict_on_batch` and similar methods give each replica the whole batch.
- `backup`, `callbacks`, `saving`: several workers write the same files.

`digests` checks that all workers train the same model.

Keras on JAX is patched in a few places, if the launcher has connected its processes: `on_jax`.

Under CentralStorageStrategy, Keras counts its metrics wrongly, and cannot assign to some variables (`variables`).

Keras is patched after its import, and only where the faulty code is found, so that a version of Keras that has fixed
a fault is not patched there. Where a version has neither the fault nor its fix, its code has changed; it is not patched
there, and a line says so. Keras before 3.10 is not patched at all, because the patches would only replace a failure
with wrong training: up to 3.7 it sums the workers' gradients instead of averaging them, and up to 3.9 its metrics are
not those of the whole batch.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from worker_entry.hooks import jax_cluster
from worker_entry.hooks.built_strategy import after_strategy
from worker_entry.hooks.import_hooks import after_import
from worker_entry.hooks.jax_time import TRAINER as JAX_TRAINER
from worker_entry.keras_patches.backup import BACKUP, patch_backup
from worker_entry.keras_patches.callbacks import MODEL_CHECKPOINT, patch_callbacks
from worker_entry.keras_patches.digests import patch_digests
from worker_entry.keras_patches.findings import Finding, State, group, unpatched
from worker_entry.keras_patches.layer_state import patch_layer_state
from worker_entry.keras_patches.layers import BATCH_NORMALIZATION, patch_batch_normalization
from worker_entry.keras_patches.losses import LOSS, patch_losses
from worker_entry.keras_patches.metrics import patch_metrics
from worker_entry.keras_patches.news import News
from worker_entry.keras_patches.on_jax.backup import patch_backup_on_jax
from worker_entry.keras_patches.on_jax.data import DATA_ADAPTERS, patch_data, patch_predict
from worker_entry.keras_patches.optimizers import (
    LOSS_SCALE_OPTIMIZER,
    OPTIMIZER,
    patch_loss_scale_optimizer,
    patch_optimizer,
)
from worker_entry.keras_patches.saving import SAVING, patch_saving
from worker_entry.keras_patches.seeds import SEED_GENERATOR, patch_seeds
from worker_entry.keras_patches.servers.parameter_server import EPOCH_ITERATOR, patch_parameter_server
from worker_entry.keras_patches.source import CALLBACK, calls_of, find_module, is_constant
from worker_entry.keras_patches.trainer import TRAINER, patch_building, patch_trainer
from worker_entry.keras_patches.variables import VARIABLE, patch_conversions, patch_optimizer_assign, patch_variable
from worker_entry.protocol.values import KerasPatch, ModelDigest

KERAS = "keras"
METRIC = "keras.src.metrics.metric"
OLDEST = "3.10"
"""The oldest version that trains correctly with patches."""

Log = Callable[[str], None]
Report = Callable[[KerasPatch], None]
ReportModel = Callable[[ModelDigest], None]
Patch = Callable[[Any, Any, News], Iterator[Finding]]


def install(
    log: Log, report: Report = lambda _: None, report_model: ReportModel = lambda _: None, *, cluster: bool = True
) -> None:
    """Patches Keras when it is imported, or now if it is already imported.

    Args:
        log: called with each line to log.
        report: called with what was patched, and what was not because its code has changed, unless both are nothing.
        report_model: called with each digest of a model that is trained.
        cluster: whether this process is one of several. If not, Keras is only patched when the program builds a
            strategy, and completely if it has several replicas.
    """

    def patch_when_imported() -> None:
        after_import(KERAS, lambda _: _patch_and_log(log, report, report_model))

    if cluster:
        patch_when_imported()
    else:
        after_strategy(patch_when_imported, several=True)
        after_strategy(lambda: after_import(KERAS, lambda _: _patch_building()), several=False)


def _patch_and_log(log: Log, report: Report, report_model: ReportModel) -> None:
    trainer = sys.modules.get(TRAINER)
    version = getattr(sys.modules.get("keras.src.version"), "__version__", "(version unknown)")
    keras = f"Keras {version}"
    if trainer is None:  # Keras 2, or Keras 3 on another backend
        if JAX_TRAINER in sys.modules and jax_cluster.is_here():
            _apply(JAX_PATCHES, sys.modules[JAX_TRAINER], version, News(log, report_model), report)
        return
    try:
        sound = _averages_over_workers()
    except Exception as error:  # noqa: BLE001 - a patch that fails must not fail the user's import of Keras
        log(f"could not inspect {keras}, which runs unpatched ({error!r})")
        return
    if not sound:
        if _is_older(version):
            log(f"{keras} is not patched: it would train wrongly even with patches; use Keras {OLDEST} or later")
        else:
            _say_changed(keras, [LOSS, METRIC], log)
            report(KerasPatch(version, 0, [LOSS, METRIC]))
        return
    _apply(PATCHES, trainer, version, News(log, report_model), report)


def _apply(patches: Sequence[tuple[str, Patch]], trainer: Any, version: str, news: News, report: Report) -> None:
    """Applies the patches to this version of Keras; reports and logs what they have found."""
    findings: list[Finding] = []
    keras, log = f"Keras {version}", news.say
    for name, patch in patches:
        try:
            module = find_module(name)
            findings.extend(patch(trainer, module, news) if module is not None else [_missing(name)])
        except Exception as error:  # noqa: BLE001 - as above
            findings.append(_missing(name))
            log(f"could not inspect {name} of {keras}, which runs unpatched ({error!r})")
    places = group(findings)
    patched, changed, fixed = (places[state] for state in (State.PATCHED, State.CHANGED, State.FIXED))
    if patched or changed:
        report(KerasPatch(version, len(patched), changed))
    if patched:
        log(f"patched {keras} for distributed training: {', '.join(patched)} (--set keras.patch=false turns this off)")
    elif not changed:
        log(f"{keras} needs no patch for distributed training")
    if fixed and (patched or changed):
        log(f"{keras} no longer has the faults of {', '.join(fixed)}, which need no patch")
    if changed:
        _say_changed(keras, changed, log)


def _is_older(version: str) -> bool:
    """Whether this version of Keras is older than `OLDEST`; also if it is unknown."""
    numbers = [[int(digits) for digits in re.findall(r"\d+", each)[:2]] for each in (version, OLDEST)]
    return numbers[0] < numbers[1]


def _say_changed(keras: str, places: list[str], log: Log) -> None:
    log(f"{keras} has changed this code, so it is not patched, and training may fail or be wrong: {', '.join(places)}")


def _missing(name: str) -> Finding:
    """The finding for a module that does not exist in this version, or cannot be inspected."""
    return unpatched(name, fixed=False)


def _patch_building() -> None:
    """Keeps Keras from reading data twice under a strategy of one device, where nothing else is at fault."""
    trainer = sys.modules.get(TRAINER)
    if trainer is not None:
        with contextlib.suppress(Exception):  # a patch that fails must not fail the user's import of Keras
            patch_building(trainer)


def _averages_over_workers() -> bool:
    """Whether Keras divides the loss by the number of replicas, and sums metrics over replicas when it reads them.

    Both are so from the version `OLDEST` on.
    """
    metric: Any = getattr(sys.modules.get(METRIC), "Metric", None)
    return hasattr(sys.modules.get(LOSS), "scale_loss_for_distribution") and any(
        keyword.arg == "synchronization" and is_constant(keyword.value, "on_read")
        for call in calls_of(metric.add_variable, "Variable")
        for keyword in call.keywords
    )


PATCHES: Sequence[tuple[str, Patch]] = (
    (TRAINER, patch_trainer),
    (LOSS, patch_losses),
    (METRIC, patch_metrics),
    (SEED_GENERATOR, patch_seeds),
    (BATCH_NORMALIZATION, patch_batch_normalization),
    (LOSS_SCALE_OPTIMIZER, patch_loss_scale_optimizer),
    (OPTIMIZER, patch_optimizer),
    (BACKUP, patch_backup),
    (VARIABLE, patch_variable),
    (VARIABLE, patch_conversions),
    (OPTIMIZER, patch_optimizer_assign),
    (VARIABLE, patch_layer_state),
    (MODEL_CHECKPOINT, patch_callbacks),
    (SAVING, patch_saving),
    (EPOCH_ITERATOR, patch_parameter_server),
    (CALLBACK, patch_digests),
)
"""Modules of Keras, each with a function that inspects and patches it, and yields what it has found.

The function gets the module of the trainer, the module, and the `News` through which it may report later."""
JAX_PATCHES: Sequence[tuple[str, Patch]] = (
    (DATA_ADAPTERS, patch_data),
    (JAX_TRAINER, patch_predict),
    (BACKUP, patch_backup_on_jax),
    (MODEL_CHECKPOINT, patch_callbacks),
    (SAVING, patch_saving),
)
"""The same for Keras on JAX."""
