"""`model.fit` of Keras 2 with MultiWorkerMirroredStrategy, which runs under any launcher, and the fault of `broken`."""

import broken

broken.at("start")

import itertools  # noqa: E402 - a failure before the imports is one of the faults

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tf_keras as keras  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()
broken.at("ready")


steps = itertools.count()


def call_layer() -> object:
    broken.at("layer", next(steps))
    return np.float32(1)


class Gain(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        broken.at("layer-trace")
        size = 7 if broken.due("layer-shape", "layer-trace") else 4
        inputs = tf.matmul(inputs, tf.eye(size))  # fault: layer-shape
        return inputs * tf.ensure_shape(tf.numpy_function(call_layer, [], tf.float32), [])


class Model(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data: object) -> object:
        broken.at("train-step")
        return super().train_step(data)


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch % 10 == 0:
            print(f"step {batch}", flush=True)
        broken.at("step", batch)
        if broken.due("evaluate-alone", "step", batch):
            self.model.evaluate(x, y, batch_size=8, verbose=0)  # fault: evaluate-alone


x, y = np.ones((8 * broken.STEPS, 4), "float32"), np.ones((8 * broken.STEPS, 1), "float32")
if broken.due("fewer-batches", "data"):
    x, y = x[:160], y[:160]
with strategy.scope():
    layers = [Gain(), keras.layers.Dense(1)]
    if broken.due("other-model", "ready"):
        layers.insert(0, keras.layers.Dense(4))
    model = Model(layers)
    model.compile("sgd", "mse")
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8).with_options(options), callbacks=[Watch()], verbose=0)
broken.at("end")
print("done", flush=True)
