"""A log of each step is only appended to, so the steps that are repeated after a restart are in it twice."""

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, is_chief, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)


class LogSteps(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if is_chief(self.model):
            with Path("steps.csv").open("a") as log:
                log.write(f"{self.epoch},{batch},{float((logs or {})['loss'])}\n")


with strategy.scope():
    model = make_model()
x, y = arrays()
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[LogSteps(), PrintEpochs(), backup])
