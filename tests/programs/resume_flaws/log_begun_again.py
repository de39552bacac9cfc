"""CSVLogger begins its file again after a restart, so the epochs before it are missing."""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
x, y = arrays()
backup = keras.callbacks.BackupAndRestore("backup")
log = keras.callbacks.CSVLogger("log.csv")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[log, PrintEpochs(), backup])
