"""Teaches a small convolutional network to read handwritten digits, on any number of workers.

An example to copy: nothing in it knows what started it. `python train.py` trains in one process. On several
workers, every worker runs the same command, with `TF_CONFIG` telling it who the others are. The last line of
each worker has the accuracy on images that were not trained on, and how many images per second all workers
together went through: all epochs but the first, which builds the graph; their validation counts as time.
"""

import argparse
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]

VALIDATION = 360  # of the 1,797 images
SEED = 1  # the same on all workers: they must agree on what is held out, and on the order of the rest


def load_data() -> tuple[Examples, Examples]:
    """Returns the images with their labels to train on, and those to validate with."""
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        # Mixed, so that those held out are like the others.
        order = np.random.default_rng(SEED).permutation(len(data["labels"]))
        images = data["images"][order, :, :, np.newaxis].astype(np.float32) / 16
        labels = data["labels"][order]
    return (images[VALIDATION:], labels[VALIDATION:]), (images[:VALIDATION], labels[:VALIDATION])


def build_model(replicas: int) -> keras.Model:
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
        # More replicas make larger batches, so fewer steps: the square root makes up for it with longer ones.
        optimizer=keras.optimizers.Adam(0.003 * replicas**0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="default: 12")
    parser.add_argument("--batch-size", type=int, default=32, help="images per replica; default: 32")
    parser.add_argument("--model-dir", type=Path, help="where digits.keras is saved; default: nowhere")
    args = parser.parse_args()

    # First of all: the strategy connects the workers, which TensorFlow refuses once it has run any operation.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    cluster = resolver.cluster_spec().as_dict()  # {} without TF_CONFIG; task_type and task_id are None then
    name = f"{resolver.task_type}:{resolver.task_id}" if cluster else "worker:0"
    is_chief = not cluster or name == "chief:0" or (name == "worker:0" and "chief" not in cluster)

    # A worker has a replica per GPU, or one on its CPU. A data set is batched for all replicas together.
    replicas = strategy.num_replicas_in_sync
    global_batch = args.batch_size * replicas
    training, validation = load_data()
    steps = len(training[0]) // global_batch
    if steps == 0:
        parser.error(f"{replicas} replicas need {global_batch} images per step; there are {len(training[0])}")
    # DATA: every worker reads the same images in the same order, and keeps its own share of each batch.
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    train_data = tf.data.Dataset.from_tensor_slices(training).shuffle(len(training[0]), seed=SEED)
    train_data = train_data.batch(global_batch, drop_remainder=True).with_options(options)
    validation_data = tf.data.Dataset.from_tensor_slices(validation).batch(global_batch).with_options(options)

    with strategy.scope():  # the variables made here are mirrored on all replicas, from the chief's values
        model = build_model(replicas)
    epoch_ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: epoch_ends.append(time.perf_counter()))
    model.fit(
        train_data,
        validation_data=validation_data,
        epochs=args.epochs,
        shuffle=False,  # the data set does it
        verbose=2 if is_chief else 0,  # a line per epoch; all workers would print the same
        callbacks=[clock],
    )

    if args.model_dir is not None:
        # Saving may need all workers, so all of them save; but only one of them may write to the real place.
        with tempfile.TemporaryDirectory() as scratch:
            directory = args.model_dir if is_chief else Path(scratch)
            directory.mkdir(parents=True, exist_ok=True)
            model.save(directory / "digits.keras")
    # After the save, not before it: the workers evaluate in step, so none leaves while another still saves.
    result = model.evaluate(validation_data, verbose=0, return_dict=True)

    line = f"{name} of {sum(map(len, cluster.values())) or 1}: validation accuracy {result['accuracy']:.3f}"
    if len(epoch_ends) > 1:
        rate = (len(epoch_ends) - 1) * steps * global_batch / (epoch_ends[-1] - epoch_ends[0])
        line += f", {rate:,.0f} images/s"
    print(line, flush=True)


if __name__ == "__main__":
    main()
