"""Trains a model with a layer that counts the inputs above zero, which differ from worker to worker: `drifting.py`.

An ordinary user's script. Nothing can average a whole number, so the workers' models drift apart.
"""

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

cluster = "TF_CONFIG" in os.environ
strategy = tf.distribute.MultiWorkerMirroredStrategy() if cluster else tf.distribute.get_strategy()


class Counting(keras.layers.Layer):  # type: ignore[misc]  # TensorFlow has no types
    def build(self, shape: Any) -> None:
        self.above = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="above")

    def call(self, inputs: Any) -> Any:
        self.above.assign_add(tf.reduce_sum(tf.cast(inputs > 0, "int32")))
        return inputs


with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Counting(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.RandomState(0).uniform(-1, 1, (32, 4)).astype("float32")
model.fit(x, x[:, :1], batch_size=8, epochs=1, shuffle=False, verbose=0)
