"""A worker that trains with Keras, 20 steps per epoch; in the first attempt, TASK misbehaves: TASK HOW [EPOCHS]."""

import os
import signal
import sys
import time
from pathlib import Path

culprit, how = sys.argv[1:3]
epochs = int(sys.argv[3]) if len(sys.argv) > 3 else 200
odd = os.environ["DISTLAUNCH_TASK"] == culprit and os.environ["DISTLAUNCH_ATTEMPT"] == "1"


def load_batch(number: int) -> object:
    if odd and how == "sleep-in-input" and number >= 15:
        time.sleep(600)
    if odd and how == "slow":
        time.sleep(0.4)  # a batch is split among three workers, so it serves three steps
    return np.full((8, 4), number % 7, "float32")


if odd and how == "never-joins":
    time.sleep(600)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
numbers = tf.data.Dataset.range(20 * epochs)
data = numbers.map(
    lambda n: (tf.ensure_shape(tf.numpy_function(load_batch, [n], tf.float32), (8, 4)), tf.zeros((8, 1)))
)


class Stop(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if odd and how == "stop" and epoch == 3:
            os.kill(os.getpid(), signal.SIGSTOP)


callbacks = [Stop()]
if how == "resume":
    callbacks.append(keras.callbacks.BackupAndRestore(Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "backup")))
model.fit(data.with_options(options), epochs=epochs, steps_per_epoch=20, verbose=0, callbacks=callbacks)
print("trained", flush=True)
