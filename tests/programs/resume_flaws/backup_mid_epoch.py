"""BackupAndRestore saves in the middle of an epoch, but the data begins again at the first batch of the epoch."""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
x, y = arrays()
backup = keras.callbacks.BackupAndRestore("backup", save_freq=3)
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[PrintEpochs(), backup])
