"""Trains a small convolutional network to read handwritten digits, under any strategy of tf.distribute.

An example to copy. `python train.py` trains in one process. On several workers, every worker runs the same command:
`TF_CONFIG` names the other workers, and `from_environment` returns the selected strategy. Each worker's last line shows
the accuracy on images that were not used for training, and how many images per second all workers together processed.
The rate excludes the first epoch, which builds the graph, and includes the time for validation.
"""

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from worker_entry import progress, strategies
from worker_entry.demo.digits import REFERENCE_BATCH, SEED, Examples, find_newest, load_data, load_or_build, save_epoch

FILES = 8  # number of files when workers share the data by file


def read_together(examples: Examples, batch: int) -> tf.data.Dataset:
    """DATA: every worker reads the same images in the same order, and keeps its own share of each batch."""
    data = tf.data.Dataset.from_tensor_slices(examples).shuffle(len(examples[0]), seed=SEED)
    return share_out(data.batch(batch, drop_remainder=True), "DATA")


def read_own_files(examples: Examples, batch: int, folder: Path) -> tf.data.Dataset:
    """FILE: every worker opens its own share of the files, and reads no others.

    Real data would be on a shared disk; here, each worker first writes its own copy of all files.
    """
    names = []
    for number, chosen in enumerate(np.array_split(np.arange(len(examples[0])), FILES)):
        names.append(str(folder / f"digits-{number}.tfrecord"))
        with tf.io.TFRecordWriter(names[-1]) as file:
            for index in chosen:
                file.write(examples[0][index].tobytes() + examples[1][index].tobytes())

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, label = tf.strings.substr(record, 0, 256), tf.strings.substr(record, 256, 1)
        return tf.reshape(tf.io.decode_raw(image, tf.float32), (8, 8, 1)), tf.io.decode_raw(label, tf.uint8)[0]

    data = tf.data.TFRecordDataset(names).map(parse).shuffle(len(examples[0]), seed=SEED)
    # Shares of files differ in size: the data repeat, so that no worker runs out while others still have some.
    return share_out(data.repeat().batch(batch, drop_remainder=True), "FILE")


def share_out(data: tf.data.Dataset, policy: str) -> tf.data.Dataset:
    """Shards the data among the workers, by a policy of tf.data's auto-sharding."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    return data.with_options(options)


def score(model: keras.Model, examples: Examples) -> float:
    """Computes the accuracy without Keras, which counts its metrics wrongly under CentralStorageStrategy."""
    images, labels = examples
    return float(np.mean(np.argmax(model(images), axis=1) == labels))


def fit(strategy: tf.distribute.Strategy, args: argparse.Namespace) -> None:
    """Trains with `model.fit`, which all workers call in the same way."""
    resolver = strategy.cluster_resolver
    cluster = resolver.cluster_spec().as_dict() if resolver is not None else {}  # {} without TF_CONFIG, too
    name = f"{resolver.task_type}:{resolver.task_id}" if cluster else "worker:0"
    is_chief = not cluster or name == "chief:0" or (name == "worker:0" and "chief" not in cluster)

    # A worker has a replica per device. A data set is batched for all replicas together.
    replicas = strategy.num_replicas_in_sync
    batch = args.global_batch or args.batch_per_replica * replicas
    training, validation = load_data()
    steps = len(training[0]) // batch
    if steps == 0:
        raise SystemExit(f"a step needs {batch} images, but there are only {len(training[0])}")
    if is_chief:
        print(f"{replicas} replicas in sync, {batch} images per step", flush=True)
    epoch, checkpoint = find_newest(args.checkpoints)
    epoch_ends: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch)
        train_data = read_own_files(training, batch, own) if args.shard_by == "file" else read_together(training, batch)
        validation_data = share_out(tf.data.Dataset.from_tensor_slices(validation).batch(batch), "DATA")
        with strategy.scope():  # the variables made here are mirrored on all replicas, from the chief's values
            model = load_or_build(checkpoint, batch)
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: epoch_ends.append(time.perf_counter()))]
        if args.checkpoints is not None:
            # Saving may need all workers, so all of them save, but only the chief saves to the real folder.
            kept = args.checkpoints if is_chief else own / "checkpoints"
            saving = keras.callbacks.LambdaCallback(on_epoch_end=lambda number, _: save_epoch(model, kept, number + 1))
            callbacks.append(saving)
        if args.log_dir is not None:
            callbacks.append(keras.callbacks.TensorBoard(args.log_dir))
        model.fit(
            train_data,
            validation_data=validation_data,
            initial_epoch=epoch,
            epochs=args.epochs,
            steps_per_epoch=steps if args.shard_by == "file" else None,
            shuffle=False,  # the data set is shuffled already
            verbose=2 if is_chief else 0,  # a line per epoch; all workers would print the same
            callbacks=callbacks,
        )
        if args.model_dir is not None:
            directory = args.model_dir if is_chief else own
            directory.mkdir(parents=True, exist_ok=True)
            model.save(directory / "digits.keras")
        # After the save, not before it: the workers evaluate in step, so no worker exits while another still saves.
        model.evaluate(validation_data, verbose=0)

    line = f"{name} of {sum(map(len, cluster.values())) or 1}: validation accuracy {score(model, validation):.3f}"
    if len(epoch_ends) > 1:
        rate = (len(epoch_ends) - 1) * steps * batch / (epoch_ends[-1] - epoch_ends[0])
        line += f", {rate:,.0f} images/s"
    print(line, flush=True)


def coordinate(strategy: tf.distribute.Strategy, args: argparse.Namespace) -> None:
    """ParameterServerStrategy: the chief schedules steps, and each worker takes the next one when it is free.

    If a worker dies, another worker takes its step.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    training, validation = load_data()
    batch = args.global_batch or args.batch_per_replica  # images per step of a worker, which waits for no other worker
    steps = len(training[0]) // batch
    epoch, checkpoint = find_newest(args.checkpoints)
    with strategy.scope():  # the variables made here live on the parameter servers
        model = load_or_build(checkpoint, batch)
        model.optimizer.build(model.trainable_variables)
        done = tf.Variable(0, dtype=tf.int64)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def train_step(batches: Iterator[Any]) -> None:
        def train(images: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = model.loss(labels, model(images, training=True))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables))

        strategy.run(train, args=next(batches))
        done.assign_add(1)

    def read() -> tf.data.Dataset:  # called for each worker; each reads all images in its own order
        return tf.data.Dataset.from_tensor_slices(training).shuffle(len(training[0])).repeat().batch(batch)

    batches = iter(coordinator.create_per_worker_dataset(read))
    for number in range(epoch + 1, args.epochs + 1):
        for _ in range(steps):
            coordinator.schedule(train_step, args=(batches,))
        coordinator.join()  # raises the error of a step that failed
        progress.report(step=number * steps, epoch=number)
        print(f"Epoch {number}/{args.epochs}: {int(done.numpy())} steps", flush=True)
        if args.checkpoints is not None:
            save_epoch(model, args.checkpoints, number)
    if args.model_dir is not None:
        args.model_dir.mkdir(parents=True, exist_ok=True)
        model.save(args.model_dir / "digits.keras")
    print(f"chief:0: validation accuracy {score(model, validation):.3f}, {int(done.numpy())} steps", flush=True)


def follow(args: argparse.Namespace) -> None:
    """The evaluator: evaluates each new checkpoint, up to the last epoch's."""
    if args.checkpoints is None:
        raise SystemExit("an evaluator needs --checkpoints")
    _, (images, labels) = load_data()
    epoch = 0
    while epoch < args.epochs:
        newest, checkpoint = find_newest(args.checkpoints)
        if checkpoint is None or newest == epoch:
            time.sleep(0.2)
            continue
        epoch = newest
        result = keras.models.load_model(checkpoint).evaluate(images, labels, verbose=0, return_dict=True)
        print(f"evaluator:0: epoch {epoch}, validation accuracy {result['accuracy']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="train for this many epochs; default: 12")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--batch-per-replica", type=int, default=REFERENCE_BATCH, help="use this many images per replica; default: 32"
    )
    size.add_argument("--global-batch", type=int, help="use this many images on all replicas together")
    parser.add_argument(
        "--shard-by",
        choices=["data", "file"],
        default="data",
        help="divide each batch or the files among the workers; default: data",
    )
    parser.add_argument("--model-dir", type=Path, help="save the trained model here, as digits.keras")
    parser.add_argument("--checkpoints", type=Path, help="save each epoch here, and resume from the last one")
    # Without TensorBoard installed, TensorFlow cannot write its files.
    logs = os.environ.get("DISTLAUNCH_LOG_DIR") if importlib.util.find_spec("tensorboard") is not None else None
    parser.add_argument("--log-dir", type=Path, default=logs, help="write this worker's TensorBoard files here")
    args = parser.parse_args()

    if os.environ.get("DISTLAUNCH_TASK", "").startswith("evaluator"):
        follow(args)
        return
    # This comes first: the strategy connects the workers, which TensorFlow refuses after it has run any operation.
    strategy = strategies.from_environment()
    keras.utils.set_random_seed(SEED)
    train = coordinate if isinstance(strategy, tf.distribute.ParameterServerStrategy) else fit
    train(strategy, args)


if __name__ == "__main__":
    main()
