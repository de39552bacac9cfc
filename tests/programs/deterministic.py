"""Trains with dropout under op determinism, on Keras 3 and on tf_keras, and prints all weights to the last bit.

`deterministic.py call` enables determinism by a call, as late as it can; `deterministic.py` leaves it to
TF_DETERMINISTIC_OPS.
"""

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

strategy = tf.distribute.MultiWorkerMirroredStrategy()


def train(library: Any) -> list[str]:
    library.utils.set_random_seed(7)
    with strategy.scope():
        layers = [library.layers.Dense(16, "tanh"), library.layers.Dropout(0.5), library.layers.Dense(1)]
        model = library.Sequential(layers)
        model.compile(library.optimizers.Adam(0.05), "mse")
    if sys.argv[1:] == ["call"]:
        tf.config.experimental.enable_op_determinism()
    x = np.random.RandomState(0).uniform(-1, 1, (64, 8)).astype("float32")
    model.fit(x, x.sum(1, keepdims=True), batch_size=16, epochs=3, shuffle=False, verbose=0)
    return [float(number).hex() for weight in model.get_weights() for number in np.ravel(weight)]


print(f"weights {train(keras) + train(tf_keras)}", flush=True)
