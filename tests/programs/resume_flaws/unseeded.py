"""Two runs of this program differ, because nothing has a seed; BackupAndRestore restores all that it can."""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = make_model(keras.layers.Dropout(0.3))
x, y = arrays()
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, callbacks=[PrintEpochs(), backup])
