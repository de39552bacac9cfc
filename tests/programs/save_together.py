"""Saves as tutorials do, to the same paths on every worker: `save_together.py DIR`.

An ordinary user's script, which runs alone as well as in a cluster. Saved files stay in DIR; the values read back from
them, and other results, are in `DIR/../results-TASK.json`.
"""

import json
import os
import pathlib
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

CLUSTER = "TF_CONFIG" in os.environ
TASK = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if CLUSTER else 0
OUT = pathlib.Path(sys.argv[1])
ModelCheckpoint = keras.callbacks.ModelCheckpoint

strategy = tf.distribute.MultiWorkerMirroredStrategy() if CLUSTER else tf.distribute.get_strategy()


@keras.utils.register_keras_serializable()
class Spread(keras.initializers.Initializer):  # type: ignore[misc]  # TensorFlow has no types
    """Numbers that differ from each other, and are the same in every run."""

    def __call__(self, shape: Any, dtype: Any = None, **_: Any) -> Any:
        flat = np.sin(1 + np.arange(int(np.prod(shape)), dtype="float64")) / 2
        return tf.constant(flat.reshape(tuple(shape)), dtype=dtype or "float32")


def layers() -> list[Any]:
    return [
        keras.layers.Dense(8, "tanh", kernel_initializer=Spread()),
        keras.layers.Dense(1, kernel_initializer=Spread()),
    ]


@keras.utils.register_keras_serializable()
class Tracking(keras.Model):  # type: ignore[misc]  # TensorFlow has no types
    """A model with its own metric, which is saved with the model, and which only all workers together can read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.body = keras.Sequential([keras.Input((4,)), *layers()])
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, inputs: Any) -> Any:
        return self.body(inputs)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        x, y = data
        self.error.update_state(y, self(x))
        return {**logs, "error": self.error.result()}


def build(kind: str) -> Any:
    with strategy.scope():
        model = Tracking() if kind == "tracking" else keras.Sequential([keras.Input((4,)), *layers()])
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def fit(model: Any, epochs: int, *callbacks: Any) -> Any:
    random = np.random.RandomState(0)
    x = random.uniform(-1, 1, (32, 4)).astype("float32")
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
    options: Any = {"epochs": epochs, "callbacks": list(callbacks), "validation_data": (x[:8], y[:8])}
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **options)


def numbers(model: Any) -> list[list[float]]:
    return [[float(number) for number in np.asarray(weight).ravel()] for weight in model.get_weights()]


def load_all(names: list[str], folder: pathlib.Path = OUT) -> dict[str, list[list[float]]]:
    loaded = {}
    for name in names:
        if name.endswith(".weights.h5"):
            model = build("tracking" if name.startswith("tracking") else "plain")
            model.load_weights(folder / name)
        else:
            # Keras 3.15 does not find "mse" when it loads a file of the old format.
            model = keras.models.load_model(folder / name, compile=not name.endswith(".h5"))
        loaded[name] = numbers(model)
    return loaded


results: dict[str, Any] = {"task": TASK}
model = build("plain")
board = keras.callbacks.TensorBoard(str(OUT / "board"), histogram_freq=1)
fit(
    model,
    3,
    # The first loss is the largest.
    ModelCheckpoint(OUT / "best.keras", monitor="loss", mode="max", save_best_only=True),
    ModelCheckpoint(OUT / "epochs" / "{epoch:02d}-{val_loss:.2f}.keras", verbose=1),
    ModelCheckpoint(OUT / "latest.weights.h5", save_weights_only=True, save_freq=3),
    ModelCheckpoint(OUT / "old.h5"),
    ModelCheckpoint(OUT / "own" / f"{TASK}.keras"),
    keras.callbacks.CSVLogger(OUT / "log.csv"),
    board,
)
# Every worker loads at once: all files exist when `fit` has returned.
epochs = sorted(f"epochs/{path.name}" for path in (OUT / "epochs").iterdir())
results["after fit"] = load_all(["best.keras", "latest.weights.h5", "old.h5", *epochs])
results["own"] = load_all([f"own/{TASK}.keras"])[f"own/{TASK}.keras"]
results["weights"] = numbers(model)
results["log_dir"] = board.log_dir

tracking = build("tracking")
fit(tracking, 1, ModelCheckpoint(OUT / "tracking.keras"))
results["tracking"] = load_all(["tracking.keras"])

# A worker that saves alone, or alone has a callback, does not wait for the others.
if TASK == 0:
    model.save(OUT / "alone.keras")
os.chdir(OUT / "own")
pathlib.Path(f"folder-{TASK}").mkdir()
os.chdir(f"folder-{TASK}")
# `here.keras` is one name for different files; `link` and `epochs` are two names for the same folder.
if TASK == 0:
    (OUT / "link").symlink_to(OUT / "epochs")
fit(
    model,
    1,
    ModelCheckpoint("here.keras"),
    ModelCheckpoint("ram://store/remote.keras"),  # each process has its own store, which shows who wrote
    ModelCheckpoint(f"ram://store/{TASK}.keras"),
    ModelCheckpoint(OUT / ("link", "epochs")[TASK] / "linked.keras", verbose=1),
    *([ModelCheckpoint(OUT / "alone-in-fit.keras")] if TASK == 1 else []),
)
results["stored"] = sorted(tf.io.gfile.listdir("ram://store"))
results["here"] = load_all(["here.keras"], pathlib.Path())

for again in (False, True):
    model.save(OUT / "final.keras")
    model.save_weights(OUT / "final.weights.h5")
    model.save(OUT / "final.h5")
    if not again:  # Keras 3.15 cannot overwrite a folder
        model.save(OUT / "folder", zipped=False)
    keras.saving.save_model(model, OUT / "by-function.keras")
    model.export(OUT / "exported")
model.export(OUT.parent / f"exported-{TASK}")
# Every worker loads these at once, too.
results["final"] = load_all(["final.keras", "final.weights.h5", "final.h5", "folder", "by-function.keras"])
served = tf.saved_model.load(str(OUT / "exported"))
results["served"] = float(served.serve(tf.ones((1, 4)))[0, 0])
results["final weights"] = numbers(model)
(OUT.parent / f"results-{TASK}.json").write_text(json.dumps(results))
