"""Trains with `model.fit` under MultiWorkerMirroredStrategy, as TensorFlow's guide does, without any launcher."""

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(32)
history = model.fit(data, epochs=2, verbose=0)
print(f"{strategy.num_replicas_in_sync} replicas, loss {history.history['loss'][-1]:.4f}")
