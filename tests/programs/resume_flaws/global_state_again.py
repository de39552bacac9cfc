"""The noise that is added to the data comes from the global state of NumPy, which is seeded anew after a restart."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from small import BATCH, EPOCHS, STEPS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
x, y = arrays()


def samples() -> Iterator[tuple[Any, Any]]:
    """The samples of an epoch; their noise is drawn at once, because tf.data reads ahead."""
    yield from zip(x + np.random.normal(0, 0.3, x.shape), y, strict=True)


signature = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
data = tf.data.Dataset.from_generator(samples, output_signature=signature).batch(BATCH, drop_remainder=True)
data = data.apply(tf.data.experimental.assert_cardinality(STEPS))
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[PrintEpochs(), backup])
