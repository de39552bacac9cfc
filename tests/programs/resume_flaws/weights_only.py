"""The weights are loaded before the optimizer has variables, so Keras leaves out Adam's moments and its step."""

import re
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, is_chief, make_model, save_whole

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)


class SaveWeights(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if is_chief(self.model):
            save_whole(self.model, f"epoch-{epoch + 1}.weights.h5")


with strategy.scope():
    model = make_model()
done = max((int(re.findall(r"\d+", path.name)[0]) for path in Path().glob("epoch-*.weights.h5")), default=0)
if done:
    model.load_weights(f"epoch-{done}.weights.h5")
x, y = arrays()
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, initial_epoch=done, callbacks=[PrintEpochs(), SaveWeights()])
