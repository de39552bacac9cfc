"""Keras on JAX, 60 epochs of 5 steps, in which the process CULPRIT is slower: in HOW (input | callback)."""

import os
import sys
import time
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

keras.distribution.initialize()
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(1)
culprit, how = sys.argv[1:]
is_slow = jax.process_index() == int(culprit)
features = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
DELAY_S = 0.05


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        if is_slow and how == "input":
            time.sleep(DELAY_S)
        rows = features[number * 32 : (number + 1) * 32]
        return rows, rows.sum(1)


class Slow(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if is_slow and how == "callback":
            time.sleep(DELAY_S)


model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(Batches(), epochs=60, shuffle=False, verbose=0, callbacks=[Slow()])
