"""After SIGTERM, the model and its epoch are saved, but the next start takes the epoch only, with an older model.

SIGTERM ends all workers at the end of the epoch: whoever gets it makes the file `stop`, which all workers see.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from small import BATCH, EPOCHS, PrintEpochs, arrays, is_chief, load_or_make, save_whole

strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
signal.signal(signal.SIGTERM, lambda *_: Path("stop").touch())


class SaveEachEpoch(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        stops = Path("stop").exists()
        if is_chief(self.model):
            save_whole(self.model, "preempted.keras" if stops else "model.keras")
            if stops:
                Path("epoch.part").write_text(str(epoch + 1))
                Path("epoch.part").rename("epoch")
        if stops:
            sys.exit(128 + signal.SIGTERM)


with strategy.scope():
    model, done = load_or_make("model.keras")  # the flaw: `preempted.keras` is newer
if Path("epoch").exists():
    done = max(done, int(Path("epoch").read_text()))
if is_chief(model):
    Path("stop").unlink(missing_ok=True)  # no epoch ends on any worker before the chief takes part
x, y = arrays()
model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, initial_epoch=done, callbacks=[PrintEpochs(), SaveEachEpoch()])
