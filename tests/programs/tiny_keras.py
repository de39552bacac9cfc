"""Shared parts of programs that train tiny models in many ways: data, initial weights, and a list of cases.

It supports Keras 3 and tf_keras (TF_USE_LEGACY_KERAS=1). Data, initial weights and the order of the samples are fixed,
so that runs can be compared number by number. It imports Keras, so a program makes its strategy before it imports this.
"""

import importlib
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

CLUSTER = "TF_CONFIG" in os.environ
BATCH = int(os.environ.get("BATCH", "8"))
"""Samples per global batch, in one process or over all workers together."""
OUT = pathlib.Path(sys.argv[1])

keras: Any = tf.keras
LIBRARY = importlib.import_module(keras.Model.__module__.partition(".")[0])
LEGACY = LIBRARY.__name__ == "tf_keras"
KERAS = tuple(map(int, LIBRARY.__version__.split(".")[:2]))

MUON = ("Muon",) if KERAS >= (3, 13) else ()
"""The optimizer of this name, which fails in earlier versions of Keras: it expects variables of Keras."""

Result = dict[str, Any]
Case = Callable[[], Result]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@keras.utils.register_keras_serializable()
class Spread(keras.initializers.Initializer):  # type: ignore[misc]  # TensorFlow has no types
    """Numbers that differ from each other, and are the same with every Keras."""

    def __call__(self, shape: Any, dtype: Any = None, **_: Any) -> Any:
        flat = np.sin(1 + np.arange(int(np.prod(shape)), dtype="float64")) / 2
        return tf.constant(flat.reshape(tuple(shape)), dtype=dtype or "float32")


def dense(units: int, activation: str | None = None) -> Any:
    return keras.layers.Dense(units, activation, kernel_initializer=Spread())


class OwnState(keras.layers.Layer):  # type: ignore[misc]  # TensorFlow has no types
    """Subtracts a running mean of its inputs, and counts its calls."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="calls")

    def call(self, inputs: Any, training: Any = None) -> Any:
        if training:
            self.mean.assign(0.8 * self.mean + 0.2 * tf.reduce_mean(inputs, 0))
            self.calls.assign_add(1)
        return inputs - self.mean


def samples(count: int, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.RandomState(seed)
    x = random.uniform(-1, 1, (count, 4)).astype("float32")
    y = (x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32") + 0.1 * x[:, :1] ** 2).astype("float32")
    return x, y


def numbers(value: Any) -> list[float]:
    return [float(number) for number in np.asarray(value, "float64").ravel()]


def weights(model: Any) -> list[list[float]]:
    return [numbers(weight) for weight in model.get_weights()]


def history(fitted: Any) -> dict[str, list[float]]:
    return {name: [float(value) for value in values] for name, values in fitted.history.items()}


class InterruptionError(Exception):
    """Stops training half-way."""


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow has no types
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptionError


def run_cases(names: list[str], file: pathlib.Path, **more: Any) -> bool:
    """Writes the cases' results, and `more`, as JSON. A case that raises is written with its traceback.

    Returns:
        Whether no case has raised.
    """
    results: Result = {"library": LIBRARY.__name__, "version": LIBRARY.__version__, **more}
    file.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in names:
        start = time.monotonic()
        try:
            results[name] = CASES[name]()
        except Exception:  # noqa: BLE001 - the traceback is the case's result
            failed = True
            results[name] = {"error": traceback.format_exc()}
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        file.write_text(json.dumps(results))
    return not failed
