"""The checkpoint is written in place, so a death while it is written leaves half a file, which cannot be read."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from small import BATCH, EPOCHS, STEPS, PrintEpochs, arrays, is_chief, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)


class SaveInPlace(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if is_chief(self.model):
            np.savez("checkpoint.npz", *[variable.numpy() for variable in state()])


def state() -> list[Any]:
    return [*model.variables, *model.optimizer.variables]


with strategy.scope():
    model = make_model()
    model.optimizer.build(model.trainable_variables)
if Path("checkpoint.npz").exists():
    with np.load("checkpoint.npz") as saved:
        for variable, value in zip(state(), saved.values(), strict=True):
            variable.assign(value)
done = int(model.optimizer.iterations.numpy()) // STEPS
x, y = arrays()
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, initial_epoch=done, callbacks=[PrintEpochs(), SaveInPlace()])
