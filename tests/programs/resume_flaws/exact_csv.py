"""A log of epochs is written anew after each epoch, without the rows of this and of later epochs."""

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, is_chief, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)


class LogEpochs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if is_chief(self.model):
            log, part = Path("log.csv"), Path("log.csv.part")
            rows = log.read_text().splitlines()[:epoch] if log.exists() else []
            rows.append(f"{epoch},{float((logs or {})['loss'])!r}")
            part.write_text("\n".join(rows) + "\n")
            part.replace(log)


with strategy.scope():
    model = make_model()
x, y = arrays()
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[LogEpochs(), PrintEpochs(), backup])
