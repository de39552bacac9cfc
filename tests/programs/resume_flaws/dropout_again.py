"""Keras saves a model without the random state of Dropout, whose first masks come again after a restart."""

from pathlib import Path

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, STEPS, PrintEpochs, SaveEachEpoch, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    saved = Path("model.keras")
    model = keras.models.load_model(saved) if saved.exists() else make_model(keras.layers.Dropout(0.3))
done = int(model.optimizer.iterations.numpy()) // STEPS
x, y = arrays()
callbacks = [PrintEpochs(), SaveEachEpoch("model.keras")]
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, initial_epoch=done, callbacks=callbacks)
