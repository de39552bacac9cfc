"""The learning rate is set by hand at the second epoch only, and each start sets the first rate, also after loading."""

from typing import Any

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, SaveEachEpoch, arrays, load_or_make

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)


class LowerRate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.optimizer.learning_rate = 0.005


with strategy.scope():
    model, done = load_or_make("model.keras")
    model.optimizer.learning_rate = 0.04
x, y = arrays()
callbacks = [LowerRate(), PrintEpochs(), SaveEachEpoch("model.keras")]
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, initial_epoch=done, callbacks=callbacks)
