"""Keras on JAX with every kind of data: prints the losses, metrics and predictions, as one process and as several."""

import json
import os
from collections.abc import Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import tensorflow as tf

if "JAX_COORDINATOR_ADDRESS" in os.environ:
    keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel())

SAMPLES, BATCH = 100, 32  # the last batch has four samples, which three processes cannot share out evenly
BATCHES = -(-SAMPLES // BATCH)
features = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
labels = features.sum(1, keepdims=True)


def read(number: int) -> tuple[Any, Any]:
    rows = slice(number * BATCH, (number + 1) * BATCH)
    return features[rows], labels[rows]


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return read(number)


def generate() -> Iterator[tuple[Any, Any]]:
    while True:
        yield from map(read, range(BATCHES))


KINDS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "arrays": ((features, labels), {"batch_size": BATCH, "validation_split": 0.2}),
    "pydataset": ((Batches(),), {"shuffle": False}),
    "generator": ((generate(),), {"steps_per_epoch": BATCHES}),
    "tf.data": ((tf.data.Dataset.from_tensor_slices((features, labels)).batch(BATCH),), {"shuffle": False}),
}
for kind, (data, options) in KINDS.items():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(*data, epochs=3, verbose=0, **options).history
    found = {
        **{name: [float(value) for value in values] for name, values in history.items()},
        "evaluate": [float(value) for value in model.evaluate(features, labels, batch_size=BATCH, verbose=0)],
        "predict": model.predict(features, batch_size=BATCH, verbose=0).ravel().tolist(),
        "predict_on_batch": model.predict_on_batch(features[:5]).ravel().tolist(),
        "train_on_batch": [float(value) for value in model.train_on_batch(features[:7], labels[:7])],
    }
    print("numbers", json.dumps({kind: found}), flush=True)
