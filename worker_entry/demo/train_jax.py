"""Trains a small convolutional network to read handwritten digits, with Keras on JAX.

An example to copy. `python train_jax.py` trains in one process. On several workers, every worker runs the same command:
`keras.distribution.initialize` finds the others by the variables that the launcher sets. Each worker's last line shows
the accuracy on images that were not used for training, and how many images per second all workers together processed.
The rate excludes the first epoch, which compiles the step, and includes the time for validation.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it when it is imported

import jax
import keras
import numpy as np

from worker_entry.demo.digits import REFERENCE_BATCH, SEED, Examples, find_newest, load_data, load_or_build, save_epoch


class OwnRows(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """All workers shuffle the images in the same way, and each returns its own rows of every batch."""

    def __init__(self, examples: Examples, batch: int) -> None:
        super().__init__()
        self.examples, self.batch = examples, batch
        self.random = np.random.default_rng(SEED)
        self.on_epoch_end()

    def __len__(self) -> int:
        return len(self.order) // self.batch  # no smaller batch at the end: it might not divide among the devices

    def __getitem__(self, index: int) -> Examples:
        own = self.batch // jax.process_count()
        first = index * self.batch + jax.process_index() * own
        rows = self.order[first : first + own]
        return self.examples[0][rows], self.examples[1][rows]

    def on_epoch_end(self) -> None:
        self.order = self.random.permutation(len(self.examples[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="train for this many epochs; default: 12")
    parser.add_argument(
        "--global-batch", type=int, help="use this many images on all devices together; default: 32 on each"
    )
    parser.add_argument("--model-dir", type=Path, help="save the trained model here, as digits.keras")
    parser.add_argument("--checkpoints", type=Path, help="save each epoch here, and resume from the last one")
    args = parser.parse_args()

    # This comes first: it connects the workers, which JAX refuses after it has computed anything.
    if "KERAS_DISTRIBUTION_JOB_ADDRESSES" in os.environ:
        keras.distribution.initialize()
    keras.utils.set_random_seed(SEED)
    # Every device gets a copy of the network, and its own part of each batch.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))

    devices, number = jax.device_count(), jax.process_index()
    batch = args.global_batch or REFERENCE_BATCH * devices
    training, validation = load_data()
    if batch % devices or not devices <= batch <= len(training[0]):
        raise SystemExit(f"{batch} images per step: use a multiple of {devices} (devices), up to {len(training[0])}")
    if number == 0:
        print(f"{devices} devices in {jax.process_count()} processes, {batch} images per step", flush=True)
    epoch, checkpoint = find_newest(args.checkpoints)
    model = load_or_build(checkpoint, batch)
    train_data = OwnRows(training, batch)
    validation_data = OwnRows(validation, len(validation[0]) // devices * devices)
    epoch_ends: list[float] = []
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: epoch_ends.append(time.perf_counter()))]
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch)
        if args.checkpoints is not None:
            # Keras' save waits for all workers, so all of them save, but only the first saves to the real folder.
            kept = args.checkpoints if number == 0 else own / "checkpoints"
            saving = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: save_epoch(model, kept, epoch + 1))
            callbacks.append(saving)
        model.fit(
            train_data,
            validation_data=validation_data,
            initial_epoch=epoch,
            epochs=args.epochs,
            shuffle=False,  # the data set is shuffled already, and all workers need the same order
            verbose=2 if number == 0 else 0,  # a line per epoch; all workers would print the same
            callbacks=callbacks,
        )
        if args.model_dir is not None:
            directory = args.model_dir if number == 0 else own
            directory.mkdir(parents=True, exist_ok=True)
            model.save(directory / "digits.keras")
    accuracy = model.evaluate(validation_data, verbose=0, return_dict=True)["accuracy"]
    line = f"worker:{number} of {jax.process_count()}: validation accuracy {accuracy:.3f}"
    if len(epoch_ends) > 1:
        rate = (len(epoch_ends) - 1) * len(train_data) * batch / (epoch_ends[-1] - epoch_ends[0])
        line += f", {rate:,.0f} images/s"
    print(line, flush=True)


if __name__ == "__main__":
    main()
