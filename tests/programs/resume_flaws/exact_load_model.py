"""The whole model is saved beside its path and renamed, and loaded with the number of its complete epochs."""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, SaveEachEpoch, arrays, load_or_make

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model, done = load_or_make("model.keras")
x, y = arrays()
callbacks = [PrintEpochs(), SaveEachEpoch("model.keras")]
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, initial_epoch=done, callbacks=callbacks)
