"""ReduceLROnPlateau forgets the best loss, so it reduces the learning rate one epoch later.

The loss never improves by `min_delta`, so without a restart the rate is reduced after each epoch but the first.
"""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
x, y = arrays()
plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.6, patience=1, min_delta=10.0)
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[plateau, PrintEpochs(), backup])
