"""The schedule of the learning rate counts its calls instead of epochs, and begins again at the first rate."""

import itertools

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
x, y = arrays()
calls = itertools.count()
schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 * 0.6 ** next(calls))
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[schedule, PrintEpochs(), backup])
