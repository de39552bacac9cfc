"""A training script as users have one, which continues from its last checkpoint; a picture of README shows it."""

import os

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()

random = np.random.default_rng(1)
labels = random.integers(10, size=4096)
images = (random.normal(size=(10, 64))[labels] + random.normal(size=(4096, 64), scale=2)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(64).repeat()

with strategy.scope():
    layers = [keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

backup = keras.callbacks.BackupAndRestore(os.path.join(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "backup"))
verbose = 2 if os.environ["DISTLAUNCH_TASK"] == "worker:0" else 0
model.fit(data, epochs=6, steps_per_epoch=100, shuffle=False, verbose=verbose, callbacks=[backup])
