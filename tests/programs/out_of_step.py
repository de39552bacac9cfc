"""Workers train with Keras, until worker:0 deviates: HOW."""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

how = sys.argv[1]
odd = os.environ["DISTLAUNCH_TASK"] == "worker:0"
strategy = tf.distribute.MultiWorkerMirroredStrategy()
x, y = np.ones((64, 4), "float32"), np.ones((64, 3), "float32")
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", loss="mse", metrics=["mae"])


class Evaluate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if odd and how == "evaluate-in-callback":
            self.model.evaluate(x, y, verbose=0)


def fewer_batches() -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    samples = 64 if odd else 40
    return tf.data.Dataset.from_tensor_slices((x[:samples], y[:samples])).batch(8).with_options(options)


model.fit(x, y, batch_size=8, callbacks=[Evaluate()], verbose=0)
if odd and how == "evaluate":
    model.evaluate(x, y, verbose=0)
if how == "fewer-batches":
    model.fit(fewer_batches(), epochs=2, verbose=0)
model.fit(x, y, batch_size=8, verbose=0)
