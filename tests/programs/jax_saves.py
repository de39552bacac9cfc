"""Keras on JAX, one step per epoch: asks JAX at each step whether it is preempted; then saves, and exits with 42."""

import os
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

jax.distributed.initialize()
keras.utils.set_random_seed(1)
keras.distribution.set_distribution(keras.distribution.DataParallel())
saved = os.path.join(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "saved.weights.h5")


class SaveWhenPreempted(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        time.sleep(0.05)
        if multihost_utils.reached_preemption_sync_point(epoch):
            if jax.process_index() == 0:
                self.model.save_weights(saved)
            print(f"saved after epoch {epoch}", flush=True)
            sys.exit(42)


features = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
again = os.path.exists(saved)
if again:
    model.load_weights(saved)
epochs = 5 if again else 100_000
model.fit(features, features.sum(1), batch_size=32, epochs=epochs, verbose=0, callbacks=[SaveWhenPreempted()])
print("trained", flush=True)
