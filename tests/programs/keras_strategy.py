"""The strategy of a program of cases, and models for them: as an ordinary user's script, it uses TF_CONFIG.

Run by distlaunch with `--strategy mirrored` or `central_storage`, a program trains on several devices of one process.
"""

import json
import os
from typing import Any

import tensorflow as tf

from worker_entry import strategies

CLUSTER = "TF_CONFIG" in os.environ
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if CLUSTER else 0

if CLUSTER:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
elif "DISTLAUNCH_STRATEGY" in os.environ:
    strategy = strategies.from_environment()
else:
    strategy = tf.distribute.get_strategy()
REPLICAS = strategy.num_replicas_in_sync
ALONE = REPLICAS == 1

from tiny_keras import (  # noqa: E402 - imports Keras, as `tf.keras` in the strategy's scope would
    BATCH,
    OUT,
    Result,
    dense,
    history,
    keras,
    weights,
)

EPOCHS = 2
"""One change of epoch. More epochs would test no more, and making their iterators takes far longer than their steps."""
OWN = OUT / f"files-{TASK}"
"""The folder for this worker's unshared files."""


def regression(*layers: Any, build: bool = False, rate: float = 0.05, **compile_options: Any) -> Any:
    """A model; if it is not built, Keras has to look at the first batch to build it."""
    with strategy.scope():
        model = keras.Sequential(list(layers) or [dense(8, "tanh"), dense(1)])
        if build:
            model.build((None, 4))
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", metrics=["mae"], **compile_options)
    return model


def fit(model: Any, x: Any, y: Any, *, epochs: int = EPOCHS, **options: Any) -> Result:
    fitted = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options)
    return {"history": history(fitted), "epochs": list(fitted.epoch), "weights": weights(model)}
