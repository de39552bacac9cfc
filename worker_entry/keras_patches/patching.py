"""Makes Keras 3 work under tf.distribute's synchronous strategies, from outside: loads the patches, and logs them.

With more than one worker, Keras 3 fails in its trainer (tensorflow#72388, keras#20585, keras#21172), before
the first step (`keras_trainer`):

- `TensorFlowTrainer._maybe_symbolic_build` hands a *tuple* of distributed values to `strategy.reduce`,
  which takes one value, to get a sample batch. One replica's part of the batch is all it needs. And it calls the model,
  also one that has no `call`, such as a GAN, whose parts are built when its train_step is traced.
- `reduce_per_replica` asks for the mean over axis 0 of every log value. The values are scalars, which
  have no axis 0: what is meant is the mean across the replicas.
- `TensorFlowTrainer._make_function` calls a tf.function inside a tf.while_loop if `steps_per_execution` is
  more than 1. A collective inside gets its key as an input of that function, and TensorFlow does not feed
  such inputs through control flow. The step has to be traced in the loop itself.

Its optimizers fail or train wrongly (`keras_optimizers`):

- `_backend_apply_gradients` clips the gradients of each replica before they are reduced. One process clips those of the
  whole batch.
- It updates variables within a condition if `gradient_accumulation_steps` or `ema_overwrite_frequency` is given.
  Replicas have to meet for that, and TensorFlow refuses it there.
- `apply` makes the optimizer's variables in the graph of the step that uses it first. TensorFlow then runs this step
  within a condition, where a collective gets no key. tf_keras makes them outside of the graph.
- `LossScaleOptimizer` (mixed_float16) looks for infinite gradients before they are reduced. So one worker skips a step
  whose collectives the others wait for, for ever.

It trains wrongly at two more places, `keras_backup` and `BatchNormalization` (`keras_layers`). This layer no longer
averages its moving statistics over the replicas (tf_keras does, and so did Keras up to 3.7), so that every worker
evaluates and saves another model. And a replica that gets no sample of an uneven last batch turns the model into NaN,
by its moments of nothing.

Under CentralStorageStrategy it counts its metrics wrongly, and cannot assign to some variables (`keras_variables`).

Keras is patched once it has been imported, and only where the faulty code is found, so that nothing happens
where Keras has fixed it itself. A Keras that fails in some new way is left as it is. So is one before 3.10,
which would only go from failing to training wrongly: up to 3.7 it adds the workers' gradients up where it should
average them, and up to 3.9 its metrics are not those of the whole batch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from worker_entry.hooks.built_strategy import watch_strategies
from worker_entry.hooks.import_hooks import after_import
from worker_entry.keras_patches.backup import BACKUP, patch_backup
from worker_entry.keras_patches.callbacks import MODEL_CHECKPOINT, patch_callbacks
from worker_entry.keras_patches.layers import BATCH_NORMALIZATION, patch_batch_normalization
from worker_entry.keras_patches.optimizers import (
    LOSS_SCALE_OPTIMIZER,
    OPTIMIZER,
    patch_loss_scale_optimizer,
    patch_optimizer,
)
from worker_entry.keras_patches.parameter_server import EPOCH_ITERATOR, patch_parameter_server
from worker_entry.keras_patches.saving import SAVING, patch_saving
from worker_entry.keras_patches.source import calls_of, is_constant
from worker_entry.keras_patches.trainer import TRAINER, patch_trainer
from worker_entry.keras_patches.variables import VARIABLE, patch_variable
from worker_entry.protocol.values import KerasPatch

KERAS = "keras"
LOSS = "keras.src.losses.loss"
METRIC = "keras.src.metrics.metric"

Log = Callable[[str], None]
Tell = Callable[[KerasPatch], None]


def install(log: Log, tell: Tell = lambda _: None, *, cluster: bool = True) -> None:
    """Patches Keras when it is imported, or now if it has been.

    Args:
        log: takes one line that says what was done.
        tell: takes what was done, if anything was.
        cluster: whether this process is one of several. Else Keras is left as it is until the program makes a strategy
            of several replicas.
    """

    def patch_when_imported() -> None:
        after_import(KERAS, lambda _: _patch_and_log(log, tell))

    seen: list[bool] = []

    def look(strategy: Any) -> None:
        with contextlib.suppress(Exception):  # a strategy of another making, which may not know yet
            if not seen and strategy.num_replicas_in_sync > 1:
                seen.append(True)
                patch_when_imported()

    if cluster:
        patch_when_imported()
    else:
        watch_strategies(look)


def _patch_and_log(log: Log, tell: Tell) -> None:
    trainer = sys.modules.get(TRAINER)
    if trainer is None:  # Keras 2, or Keras 3 on another backend
        return
    version = getattr(sys.modules.get("keras.src.version"), "__version__", "(version unknown)")
    keras = f"Keras {version}"
    try:
        sound = _averages_over_workers()
    except Exception as error:  # noqa: BLE001 - a patch that fails must not fail the user's import of Keras
        log(f"could not look at {keras} to patch it ({error!r}); it runs as it is")
        return
    if not sound:
        log(f"{keras} is not patched, for it would train wrongly on several workers; 3.10 or later would not")
        return
    patched: list[str] = []
    unclear = False
    for name, patch in PATCHES.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        try:
            patched += patch(trainer, module)
        except Exception as error:  # noqa: BLE001 - as above
            unclear = True
            log(f"could not look at {keras} to patch {name} ({error!r}); it runs as it is")
    if patched:
        tell(KerasPatch(version, len(patched)))
        log(f"patched {keras} for distributed training: {', '.join(patched)} (--no-keras-patch turns this off)")
    elif not unclear:
        log(f"{keras} needs no patch for distributed training")


def _averages_over_workers() -> bool:
    """Whether Keras divides the loss by the number of replicas, and sums its metrics over them when it reads them."""
    metric: Any = getattr(sys.modules.get(METRIC), "Metric", None)
    return hasattr(sys.modules.get(LOSS), "scale_loss_for_distribution") and any(
        keyword.arg == "synchronization" and is_constant(keyword.value, "on_read")
        for call in calls_of(metric.add_variable, "Variable")
        for keyword in call.keywords
    )


PATCHES = {
    TRAINER: patch_trainer,
    BATCH_NORMALIZATION: patch_batch_normalization,
    LOSS_SCALE_OPTIMIZER: patch_loss_scale_optimizer,
    OPTIMIZER: patch_optimizer,
    BACKUP: patch_backup,
    VARIABLE: patch_variable,
    MODEL_CHECKPOINT: patch_callbacks,
    SAVING: patch_saving,
    EPOCH_ITERATOR: patch_parameter_server,
}
"""What looks at which module of Keras."""
