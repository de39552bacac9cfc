"""What the demo does alike with each framework: it reads the digits, builds the network, and saves it."""

from pathlib import Path
from typing import Optional

import keras
import numpy as np
import numpy.typing as npt

Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]

VALIDATION = 360  # of the 1,797 images
SEED = 1  # the same on all workers: they must agree on the held-out images, the order of the others, and the weights
REFERENCE_BATCH = 32  # the batch size for which the learning rate was chosen


def load_data() -> tuple[Examples, Examples]:
    """Returns the images and labels for training and for validation."""
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        # Shuffled, so that the held-out images are like the others.
        order = np.random.default_rng(SEED).permutation(len(data["labels"]))
        images = data["images"][order, :, :, np.newaxis].astype(np.float32) / 16
        labels = data["labels"][order]
    return (images[VALIDATION:], labels[VALIDATION:]), (images[:VALIDATION], labels[:VALIDATION])


def build_model(batch: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        # More replicas mean larger batches and fewer steps. A rate that grows by the square root compensates for that.
        optimizer=keras.optimizers.Adam(0.003 * (batch / REFERENCE_BATCH) ** 0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def find_newest(checkpoints: Optional[Path]) -> tuple[int, Optional[Path]]:
    """The last saved epoch and its file; 0 and None if there is none."""
    saved = sorted(checkpoints.glob("epoch-*.keras")) if checkpoints is not None else []
    return (int(saved[-1].stem.partition("-")[2]), saved[-1]) if saved else (0, None)


def load_or_build(checkpoint: Optional[Path], batch: int) -> keras.Model:
    return keras.models.load_model(checkpoint) if checkpoint is not None else build_model(batch)


def save_epoch(model: keras.Model, folder: Path, epoch: int) -> None:
    """Saves the model atomically: an evaluator may be waiting for the file."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "part.keras"  # always the same name: a restart overwrites the file of a killed process
    model.save(part)
    part.rename(folder / f"epoch-{epoch:04}.keras")
