"""Reads its input in many ways; prints for each how long it has waited for input, and how long it took."""

import json
import time
from collections.abc import Callable
from typing import Any

from worker_entry.hooks.input_time import InputClock

clock = InputClock()

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras  # noqa: E402

BATCHES, BATCH_S = 10, 0.02
times: dict[str, Any] = {"nothing": clock.waited_s()}
strategy = tf.distribute.MirroredStrategy()


def measure(name: str, run: Callable[[], object]) -> None:
    before, began = clock.waited_s() or 0.0, time.perf_counter()
    run()
    times[name] = (clock.waited_s() or 0.0) - before, time.perf_counter() - began


def load(number: int) -> object:
    time.sleep(BATCH_S)
    return np.ones((8, 4), "float32")


def make_data() -> Any:
    numbers = tf.data.Dataset.range(BATCHES + 1)
    return numbers.map(
        lambda number: (tf.ensure_shape(tf.numpy_function(load, [number], tf.float32), (8, 4)), tf.ones((8, 1)))
    )


def in_python() -> None:
    batches = iter(make_data())
    for _ in range(BATCHES):
        next(batches)


def inside_out() -> None:
    """tf.data calls a generator that reads from tf.data."""
    for _ in tf.data.Dataset.from_generator(make_data, output_signature=make_data().element_spec):
        pass


def add_up(batches: Any) -> Any:
    return tf.reduce_sum(next(batches)[0])


def in_graph() -> None:
    batches, step = iter(make_data()), tf.function(add_up)
    for _ in range(BATCHES):
        step(batches)


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def unrolled(batches: Any) -> Any:
    return [add_up(batches) for _ in range(BATCHES)]


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def loop(batches: Any) -> Any:
    total = 0.0
    for _ in tf.range(BATCHES):
        total += tf.reduce_sum(next(batches)[0])
    return total


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def distributed_step(batches: Any) -> Any:
    return strategy.run(lambda batch: tf.reduce_sum(batch[0]), args=(next(batches),))


def distributed() -> None:
    batches = iter(strategy.experimental_distribute_dataset(make_data()))
    for _ in range(BATCHES // 2):
        distributed_step(batches)
        next(batches)


def fit(library: Any, **options: Any) -> None:
    model = library.Sequential([library.layers.Input((4,)), library.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    model.fit(make_data(), steps_per_epoch=BATCHES, verbose=0)


class Exported(tf.Module):  # type: ignore[misc]  # TensorFlow has no types
    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def first(self, batches: Any) -> Any:
        return next(batches)[0]


measure("in Python", in_python)
measure("inside out", inside_out)
measure("in a graph", in_graph)
measure("unrolled", lambda: unrolled(iter(make_data())))
measure("in a loop", lambda: loop(iter(make_data())))
distributed()  # the iterator prepares batches while the graph is built
measure("distributed", distributed)
measure("keras fit", lambda: fit(keras))
measure("keras fit, several steps in one", lambda: fit(keras, steps_per_execution=5))
measure("tf_keras fit", lambda: fit(tf_keras))
measure("tf_keras fit, several steps in one", lambda: fit(tf_keras, steps_per_execution=5))
measure("computing", lambda: time.sleep(0.1))
module = Exported()
module.first(iter(make_data()))
tf.saved_model.save(module, "exported")
measure("exported", lambda: tf.saved_model.load("exported").first(iter(make_data())))
tf.config.experimental.enable_op_determinism()
times["deterministic"] = clock.waited_s()
print(tf.function(add_up)(iter(make_data())).shape)
print(json.dumps(times))
