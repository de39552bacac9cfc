"""Keras with BackupAndRestore, in a shared folder or in one folder per worker: EPOCHS (shared | own | empty) [PAUSE].

In the first attempt worker:1 dies in its third epoch; with PAUSE it does not, and each epoch takes PAUSE seconds more.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

epochs, where = int(sys.argv[1]), sys.argv[2]
pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
task, attempt = os.environ["DISTLAUNCH_TASK"], int(os.environ["DISTLAUNCH_ATTEMPT"])
folder = Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "backup" if where == "shared" else task.replace(":", "-"))
if where == "empty" and task != "worker:0":  # as if its own disk had been lost
    shutil.rmtree(folder, ignore_errors=True)


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        print(f"epoch {epoch + 1} begins", flush=True)
        time.sleep(pause_s)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if not pause_s and attempt == 1 and task == "worker:1" and self.seen == 2 and batch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.seen = epoch + 1

    seen = 0


strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
x = np.random.default_rng(1).normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1))).batch(16)
backup = keras.callbacks.BackupAndRestore(str(folder))
history = model.fit(data, epochs=epochs, verbose=0, callbacks=[backup, Watch()])
print(f"epochs {history.epoch}, loss {history.history['loss'][-1]:.6f}", flush=True)
print(f"iterations {int(model.optimizer.iterations.numpy())}", flush=True)
print("sum", repr(float(sum(np.abs(w).sum() for w in model.get_weights()))), flush=True)
