"""The data has another order in each epoch, whose seed is the number of the epoch."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from small import BATCH, EPOCHS, STEPS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)


class Order(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def samples(self) -> Iterator[tuple[Any, Any]]:
        order = np.random.default_rng(self.epoch).permutation(len(x))
        yield from zip(x[order], y[order], strict=True)


with strategy.scope():
    model = make_model()
x, y = arrays()
order = Order()
signature = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
data = tf.data.Dataset.from_generator(order.samples, output_signature=signature).batch(BATCH, drop_remainder=True)
data = data.apply(tf.data.experimental.assert_cardinality(STEPS))
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[order, PrintEpochs(), backup])
