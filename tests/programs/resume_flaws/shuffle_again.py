"""The data is shuffled anew for each epoch, and after a restart, the order of the first epoch comes again."""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
data = tf.data.Dataset.from_tensor_slices(arrays()).shuffle(128, seed=3, reshuffle_each_iteration=True).batch(BATCH)
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[PrintEpochs(), backup])
