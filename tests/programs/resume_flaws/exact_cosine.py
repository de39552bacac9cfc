"""A schedule computes the learning rate from the optimizer's step, which BackupAndRestore restores."""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, STEPS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model(learning_rate=keras.optimizers.schedules.CosineDecay(0.05, EPOCHS * STEPS))
x, y = arrays()
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[PrintEpochs(), backup])
