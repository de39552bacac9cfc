"""The whole model is loaded, but `initial_epoch` is not passed, so training does all epochs again."""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, SaveEachEpoch, arrays, load_or_make

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model, _ = load_or_make("model.keras")
x, y = arrays()
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[PrintEpochs(), SaveEachEpoch("model.keras")])
