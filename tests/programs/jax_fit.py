"""Keras on JAX, 4 epochs of 5 steps: CULPRIT HOW, what that process does at step 8 of the first attempt.

HOW: none | raise | exit | kill | stop | hang | late (it does not call `initialize` for an hour).
"""

import os
import signal
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

culprit, how = sys.argv[1:]
is_culprit = os.environ["JAX_PROCESS_ID"] == culprit and os.environ["DISTLAUNCH_ATTEMPT"] == "1"
if is_culprit and how == "late":
    time.sleep(3600)
keras.distribution.initialize()
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(1)


class Fault(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    step = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.step += 1
        if not is_culprit or self.step != 8:
            return
        if how == "raise":
            raise ValueError("batch 8 has no label")
        if how == "exit":
            sys.exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "hang":
            time.sleep(3600)


features = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("sgd", "mse")
callbacks = [keras.callbacks.BackupAndRestore(os.environ["DISTLAUNCH_CHECKPOINT_DIR"]), Fault()]
print(f"process {jax.process_index()} of {jax.process_count()}", flush=True)
model.fit(features, features.sum(1), batch_size=32, epochs=4, verbose=0, callbacks=callbacks)
print("trained", flush=True)
