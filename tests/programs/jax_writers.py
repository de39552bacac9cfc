"""Keras on JAX with every callback that writes, all on one path: WHERE (together | apart) the backups are.

In the first attempt, the second process is killed at the beginning of the third epoch.
"""

import os
import signal
import sys

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

keras.distribution.initialize()
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(1)
folder, number = os.environ["DISTLAUNCH_CHECKPOINT_DIR"], jax.process_index()
backup = f"backup-{number}" if sys.argv[1] == "apart" else "backup"


class Fault(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        print("epoch", epoch, flush=True)
        if epoch == 2 and number == 1 and os.environ["DISTLAUNCH_ATTEMPT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


features = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("adam", "mse")
callbacks = [
    keras.callbacks.BackupAndRestore(os.path.join(folder, backup)),
    keras.callbacks.ModelCheckpoint(os.path.join(folder, "best.keras"), save_best_only=True, monitor="loss"),
    keras.callbacks.CSVLogger(os.path.join(folder, "log.csv"), append=True),
    keras.callbacks.OrbaxCheckpoint(os.path.join(folder, "orbax"), monitor="loss"),
    Fault(),
]
model.fit(features, features.sum(1), batch_size=32, epochs=4, verbose=0, callbacks=callbacks)
model.save(os.path.join(folder, "last.keras"))
if number == 0:  # the others need not save
    model.save_weights(os.path.join(folder, "last.weights.h5"))
expected = model.predict(features, verbose=0)
loaded = keras.models.load_model(os.path.join(folder, "last.keras"))
np.testing.assert_allclose(loaded.predict(features, verbose=0), expected, rtol=1e-5)
print("loaded: the same predictions", flush=True)
