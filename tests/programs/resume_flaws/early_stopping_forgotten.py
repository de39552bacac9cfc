"""EarlyStopping forgets the best loss and how long it has waited, so training ends later.

The loss never improves by `min_delta`, so without a restart training ends after four epochs of six.
"""

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, make_model

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = make_model()
x, y = arrays()
stopping = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=10.0)
backup = keras.callbacks.BackupAndRestore("backup")
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[stopping, PrintEpochs(), backup])
