"""After each epoch, the model is pulled towards an average of its weights, which is in no checkpoint."""

from typing import Any

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)


class Average(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    average: list[Any] | None = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        weights = self.model.get_weights()
        before = weights if self.average is None else self.average
        self.average = [0.8 * old + 0.2 * new for old, new in zip(before, weights, strict=True)]
        self.model.set_weights([(old + new) / 2 for old, new in zip(self.average, weights, strict=True)])


with strategy.scope():
    model = make_model()
x, y = arrays()
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[Average(), PrintEpochs(), backup])
