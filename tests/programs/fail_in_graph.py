"""Prints the messages of real failures of TensorFlow and Keras, by name, as JSON."""

import json
import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
one = tf.constant([1.0, 5.0])
ANY = tf.TensorSpec([None])
samples = np.zeros((8, 4), "float32")


def model(*layers: keras.layers.Layer) -> keras.Model:
    made = keras.Sequential([keras.layers.Input((4,)), *layers])
    made.compile("sgd", loss="mse")
    return made


def bad_label() -> None:
    made = model(keras.layers.Dense(10))
    made.compile("sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    made.fit(samples, np.full((8,), 14), verbose=0)


def bad_label_on_two_replicas() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        bad_label()


def bad_index() -> None:
    model(keras.layers.Embedding(10, 4)).fit(np.full((8, 4), 77), np.zeros((8, 4, 4), "float32"), verbose=0)


class Halves(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(tf.reshape(x, tf.stack([tf.shape(x)[0] * 2, -1])), tf.ones([4, 10]))

    def compute_output_shape(self, shape: object) -> tuple[None, int]:
        return (None, 10)


def bad_matmul() -> None:
    model(Halves()).fit(samples, np.zeros((8, 10), "float32"), verbose=0)


class Huge(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: tf.Tensor) -> tf.Tensor:
        # 256 TiB: more than there are addresses, for a system may promise any amount of memory.
        return x + tf.reduce_sum(tf.random.normal([1 << 22, (1 << 22) * tf.shape(x)[1]]))


def out_of_memory() -> None:
    model(Huge()).fit(samples, samples, verbose=0)


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def checked(x: tf.Tensor) -> tf.Tensor:
    tf.debugging.assert_less(x, 3.0, message="x is too large")
    return x


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def misspelt(x: tf.Tensor) -> tf.Tensor:
    return undefined + x  # type: ignore[name-defined]  # noqa: F821 - that is the mistake


@tf.function(jit_compile=True, input_signature=[ANY, ANY])  # type: ignore[untyped-decorator]  # as above
def compiled(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return x + y


def in_map(do: Callable[[tf.Tensor], object]) -> None:
    list(tf.data.Dataset.from_tensor_slices([b"no image"]).map(do))


def load(_: object) -> float:
    raise KeyError("bad sample")


CASES: dict[str, Callable[[], object]] = {
    "bad label": bad_label,
    "bad label on two replicas": bad_label_on_two_replicas,
    "bad index": bad_index,
    "bad matmul": bad_matmul,
    "out of memory": out_of_memory,
    "assertion": lambda: checked(one),
    "autograph": lambda: misspelt(one),
    "xla": lambda: compiled(tf.zeros([3]), tf.zeros([4])),
    "input shape": lambda: model(keras.layers.Dense(10)).fit(np.zeros((8, 5)), np.zeros((8, 10)), verbose=0),
    "bad image": lambda: in_map(tf.io.decode_jpeg),
    "python in map": lambda: in_map(lambda x: tf.numpy_function(load, [x], tf.float32)),
    "missing file": lambda: list(tf.data.TFRecordDataset(["/absent.tfrecord"])),
    "eager": lambda: tf.matmul(tf.zeros([2, 3]), tf.zeros([4, 5])),
}

messages = {}
for name, case in CASES.items():
    try:
        case()
    except Exception as error:  # noqa: BLE001 - every failure is wanted here
        messages[name] = str(error)
json.dump(messages, sys.stdout)
