"""What the programs of this folder share: data, a tiny model, its files, and a callback that prints each epoch.

It starts no operation of TensorFlow when it is imported, so a program may make its strategy before or after.
"""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

EPOCHS = 6
STEPS = 8
"""Of an epoch."""
BATCH = 16
"""Samples of a step, over all workers."""


def arrays() -> tuple[Any, Any]:
    random = np.random.default_rng(7)
    x = random.uniform(-1, 1, (STEPS * BATCH, 4)).astype("float32")
    return x, np.sin(2 * x.sum(axis=1, keepdims=True)) + random.normal(0, 0.1, (len(x), 1)).astype("float32")


def layers(*inner: Any) -> list[Any]:
    return [keras.Input((4,)), keras.layers.Dense(8, "tanh"), *inner, keras.layers.Dense(1)]


def make_model(*inner: Any, learning_rate: Any = 0.02) -> Any:
    """A compiled model; the layers `inner` are between its two others."""
    model = keras.Sequential(layers(*inner))
    model.compile(keras.optimizers.Adam(learning_rate), "mse")
    return model


def load_or_make(path: str) -> tuple[Any, int]:
    """The model of this file, or a new one without a file; and the number of its complete epochs."""
    model = keras.models.load_model(path) if Path(path).exists() else make_model()
    return model, int(model.optimizer.iterations.numpy()) // STEPS


def is_chief(model: Any) -> bool:
    """Whether this worker writes the files."""
    return bool(model.distribute_strategy.extended.should_checkpoint)


def save_whole(model: Any, path: str) -> None:
    """Saves the model, or its weights if the path ends with .weights.h5, beside the path; renames the complete file."""
    if path.endswith(".weights.h5"):
        model.save_weights(f"part-{path}", overwrite=True)
    else:
        model.save(f"part-{path}", overwrite=True)
    os.replace(f"part-{path}", path)


class SaveEachEpoch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Saves the complete model after each epoch."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if is_chief(self.model):
            save_whole(self.model, self.path)


class PrintEpochs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Prints loss, sum of the weights and learning rate of each epoch, to the last digit."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        print_epoch(epoch, (logs or {})["loss"], self.model, self.model.optimizer)


def print_epoch(epoch: int, loss: Any, model: Any, optimizer: Any) -> None:
    total = sum(float(np.abs(weight).sum(dtype="float64")) for weight in model.get_weights())
    rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
    print(f"epoch {epoch + 1} loss {float(loss)!r} weights {total!r} rate {rate!r}", flush=True)
