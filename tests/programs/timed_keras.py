"""Trains EPOCHS epochs of 20 steps with Keras; prints when each step is done, and keeps a backup.

With a second argument, the first attempt does not end: it stays at the beginning of that epoch.
"""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        if os.environ["DISTLAUNCH_ATTEMPT"] == "1" and [str(epoch)] == sys.argv[2:]:
            time.sleep(600)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        time.sleep(0.05)
        print(f"step {int(self.model.optimizer.iterations.numpy())} {time.time():.4f}", flush=True)


strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((160, 4), "float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8)
backup = keras.callbacks.BackupAndRestore(Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "backup"))
model.fit(data, epochs=int(sys.argv[1]), verbose=0, callbacks=[backup, Watch()])
print(f"end {time.time():.4f}", flush=True)
