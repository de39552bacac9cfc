"""Trains tiny models under ParameterServerStrategy by `model.fit`: `parameter_server_cases.py DIR [CASE…]`.

An ordinary user's script, for Keras 3 and for tf_keras (TF_USE_LEGACY_KERAS=1); without TF_CONFIG it trains alone. It
writes its results as JSON. Data, initial weights and the order of the samples are fixed, so that runs with one worker
can be compared number by number.
"""

import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

PLAIN = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
CLUSTER = "TF_CONFIG" in os.environ
strategy = (
    tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver(),
        # Keras 3 must work without a partitioner; with one, get_weights of tf_keras would return the parts.
        variable_partitioner=None if PLAIN else tf.distribute.experimental.partitioners.FixedShardsPartitioner(2),
    )
    if CLUSTER
    else tf.distribute.get_strategy()
)

from tiny_keras import (  # noqa: E402 - imports Keras, as `tf.keras` in the strategy's scope would
    BATCH,
    CASES,
    LEGACY,
    MUON,
    OUT,
    Interrupt,
    InterruptionError,
    OwnState,
    Result,
    case,
    dense,
    history,
    keras,
    numbers,
    run_cases,
    samples,
    weights,
)


@keras.utils.register_keras_serializable()
class Samples(keras.metrics.Metric):  # type: ignore[misc]  # TensorFlow has no types
    """The number of samples seen, counted as Keras 3 writes its metrics: read, add, assign."""

    def __init__(self, name: str = "samples", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.seen = self.add_weight(name="seen", shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(self.seen + tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self) -> Any:
        return tf.convert_to_tensor(self.seen)


def batches(count: int, seed: int = 0) -> Any:
    return tf.data.Dataset.from_tensor_slices(samples(count, seed)).batch(BATCH)


def by_function(read: Callable[[Any], Any]) -> Any:
    """Data that each worker makes itself: tf_keras's class for this, or the function alone."""
    if not CLUSTER:
        return read(tf.distribute.InputContext())
    return keras.utils.experimental.DatasetCreator(read) if LEGACY else read


def regression(*layers: Any, optimizer: Callable[[], Any] | None = None, build: bool = False, **options: Any) -> Any:
    with strategy.scope():
        model = keras.Sequential(list(layers) or [dense(8, "tanh"), dense(1)])
        if build:
            model.build((None, 4))
        chosen = optimizer() if optimizer is not None else keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(chosen, "mse", **{"metrics": ["mae", Samples()], **options})
    return model


def fit(model: Any, *data: Any, epochs: int = 3, steps: int = 5, **options: Any) -> Result:
    fitted = model.fit(*data, epochs=epochs, steps_per_epoch=steps, verbose=0, **options)
    return {
        "history": history(fitted),
        "epochs": list(fitted.epoch),
        "weights": weights(model),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


@case
def fit_on_dataset() -> Result:
    """A tf.data.Dataset, and a model that is not built yet."""
    model = regression()
    result = fit(model, batches(40).repeat())
    variables = model.optimizer.variables() if LEGACY else [*model.variables, *model.optimizer.variables]
    devices = [variable.device if LEGACY else variable.value.device for variable in variables]
    return {**result, "places": sorted({re.sub("/(replica|task|device).*", "", device) for device in devices})}


@case
def fit_on_function() -> Result:
    """A function of a tf.distribute.InputContext, with Adam."""

    def read(context: Any) -> Any:
        return batches(40 * context.num_input_pipelines).repeat()

    return fit(regression(optimizer=lambda: keras.optimizers.Adam(0.05)), by_function(read))


@case
def fit_on_arrays() -> Result:
    """Arrays, with weights of the samples."""
    x, y = samples(40)
    return fit(
        regression(), x, y, batch_size=BATCH, shuffle=False, sample_weight=np.linspace(0.1, 2, 40, dtype="float32")
    )


@case
def fit_on_distributed_dataset() -> Result:
    """A data set that a coordinator has already distributed."""
    if not CLUSTER:
        return {"created": fit(regression(), batches(40).repeat())}
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    created = coordinator.create_per_worker_dataset(lambda: batches(40).repeat())
    return {"created": fit(regression(), created)}


@case
def validation() -> Result:
    """Validation after each epoch, with a last batch of one sample."""
    data = batches(17, seed=1)
    return fit(regression(), batches(40).repeat(), validation_data=data, validation_steps=3)


@case
def steps_per_execution() -> Result:
    """Four steps per execution, with ten steps in an epoch."""
    return fit(
        regression(steps_per_execution=4),
        batches(80).repeat(),
        steps=10,
        validation_data=batches(48, seed=1),
        validation_steps=6,
    )


@case
def evaluate() -> Result:
    """`model.evaluate` with a smaller last batch, on a data set and on arrays, compared with NumPy."""
    model = regression()
    fit(model, batches(40).repeat(), epochs=1)
    x, y = samples(37, seed=2)
    hidden, hidden_bias, last, last_bias = model.get_weights()
    predicted = np.tanh(x @ hidden + hidden_bias) @ last + last_bias
    error = predicted - y
    result = {
        "expected": [float(np.mean(error**2)), float(np.mean(np.abs(error))), 37.0],
        "evaluated": numbers(model.evaluate(batches(37, seed=2), steps=5, verbose=0)),
        "expected_predictions": numbers(predicted),
    }
    result["predicted"] = numbers(model.predict(x, batch_size=BATCH, verbose=0))
    result["without_steps"] = numbers(model.evaluate(x, y, batch_size=BATCH, verbose=0))
    result["too_many_steps"] = numbers(model.evaluate(batches(37, seed=2), steps=50, verbose=0))
    result["by_function"] = numbers(model.evaluate(by_function(lambda _: batches(37, seed=2)), steps=5, verbose=0))
    return result


@case
def single_batches() -> Result:
    """`train_on_batch` and `test_on_batch`, which run in the chief."""
    model = regression()
    x, y = samples(8)
    trained = [numbers(model.train_on_batch(x, y)) for _ in range(3)]
    return {"trained": trained, "tested": numbers(model.test_on_batch(x, y)), "weights": weights(model)}


class Watch(keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow has no types
    """Records the arguments of epoch callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()
        self.calls: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("train begins")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch} begins")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch} ends with {sorted(logs)}")
        self.types |= {type(value).__name__ for value in logs.values()}

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(f"test ends with {sorted(logs)}")

    def on_train_end(self, logs: Any = None) -> None:
        self.calls.append("train ends")


@case
def callbacks() -> Result:
    """Early stopping, a learning rate schedule, checkpoints of models and of weights, and a custom callback."""
    x, _ = samples(16, seed=1)
    best, latest = OUT / "best.keras", OUT / "latest.weights.h5"
    watch = Watch()
    result = fit(
        model := regression(build=True),
        batches(40).repeat(),
        epochs=30,
        # Data that the model fits better for some epochs only.
        validation_data=tf.data.Dataset.from_tensor_slices((x, np.full((16, 1), 0.3, "float32"))).batch(BATCH),
        validation_steps=2,
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) * 0.9),
            keras.callbacks.ModelCheckpoint(str(best), monitor="val_loss", save_best_only=True),
            keras.callbacks.ModelCheckpoint(str(latest), save_weights_only=True),
            watch,
        ],
    )
    saved = keras.models.load_model(str(best))
    return {
        **result,
        "saved": weights(saved),
        "latest_is_there": float(latest.exists()),
        "rate": float(model.optimizer.learning_rate.numpy()),
        "calls": watch.calls,
        "types": sorted(watch.types),
    }


class WatchBatches(keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow has no types
    """Records the arguments of batch callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[str], list[str]]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, sorted(logs), sorted({type(value).__name__ for value in logs.values()})))


@case
def batch_callbacks() -> Result:
    """Batch callbacks get the metrics of the finished steps. tf_keras refuses batch callbacks."""
    watch = WatchBatches()
    fit(regression(), batches(40).repeat(), callbacks=[watch], epochs=2)
    return {"seen": watch.seen}


@case
def backup_and_restore() -> Result:
    """A fit is interrupted after two epochs; another one resumes, and ends as if nothing had happened."""

    def run(*callbacks: Any) -> Result:
        return fit(regression(build=True), batches(40).repeat(), epochs=4, callbacks=list(callbacks))

    directory = str(OUT / "backup")
    interrupted = False
    try:
        run(keras.callbacks.BackupAndRestore(directory), Interrupt())
    except InterruptionError:
        interrupted = True
    resumed = run(keras.callbacks.BackupAndRestore(directory))
    return {"interrupted": interrupted, **resumed, "uninterrupted": run()}


class OwnStep(keras.Sequential):  # type: ignore[misc]  # TensorFlow has no types
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"own_loss": loss}


@case
def custom_train_step() -> Result:
    """A custom train_step: its value of the last step is in the history."""
    with strategy.scope():
        model = OwnStep([dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    return fit(model, batches(40).repeat())


@case
def normalized_and_dropped_out() -> Result:
    """Layers with state: BatchNormalization, and Dropout with its generator."""
    layers = keras.layers
    model = regression(dense(8), layers.BatchNormalization(), layers.Dropout(0.0), dense(1))
    return fit(model, batches(40).repeat())


@case
def own_functions() -> Result:
    """A loss and a metric that are one number each, a layer with a state of its own, and random masks."""
    with strategy.scope():
        model = keras.Sequential([dense(8, "tanh"), OwnState(), keras.layers.Dropout(0.5, seed=3), dense(1)])
        error = lambda y, p: tf.reduce_mean(tf.abs(y - p))  # noqa: E731 - as a user writes it
        model.compile(keras.optimizers.SGD(0.05), lambda y, p: tf.reduce_mean(tf.square(y - p)), metrics=[error])
    result = fit(model, batches(40).repeat())
    result["history"] = {name.strip("<>"): values for name, values in result["history"].items()}
    return result


@case
def every_optimizer() -> Result:
    """All optimizers that work in one process, with one kind of clipping each."""
    clipping: list[dict[str, float]] = [{}, {"clipnorm": 0.4}, {"clipvalue": 0.2}, {"global_clipnorm": 0.7}]
    first = "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl"
    results: Result = {}
    for number, name in enumerate([*first, "Lamb", "Lion", *MUON, "Nadam", "RMSprop", "SGD"]):
        options = {**clipping[number % 4], **({"use_ema": True} if number % 3 == 0 else {})}
        make = functools.partial(getattr(keras.optimizers, name), learning_rate=0.05, **options)
        results[name] = fit(regression(optimizer=make), batches(40).repeat(), epochs=1)["weights"]
    return results


@case
def predict_on_batch() -> Result:
    model = regression(build=True)
    x, _ = samples(6)
    return {"on_batch": numbers(model.predict_on_batch(x)), "predict": numbers(model.predict(x, verbose=0))}


@case
def converges() -> Result:
    """Enough steps to learn a linear model, however the workers take turns."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[Samples()])
    x, _ = samples(80)
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)
    return fit(model, data, epochs=3, steps=60)


@case
def without_steps() -> Result:
    """`fit` without the number of steps per epoch."""
    if not CLUSTER:
        return {}  # alone, it would train for ever
    x, y = samples(20)
    by_itself = regression().fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["samples"]
    refusals = []
    for data in (batches(40).repeat(), lambda _: batches(40)):
        try:
            regression().fit(data, verbose=0)
        except ValueError as error:
            refusals.append(str(error))
    return {"samples": numbers(by_itself), "refusals": refusals}


@case
def refused() -> Result:
    """Unsupported features under this strategy are refused with a message."""
    refusals = []
    data, (x, y) = batches(40).repeat(), samples(40)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    per_worker = coordinator.create_per_worker_dataset(lambda: batches(40).repeat())

    def predict_in_scope() -> None:
        with strategy.scope():
            regression(build=True).predict(x)

    for use in (
        lambda: fit(regression(run_eagerly=True), data),
        lambda: fit(regression(optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), data),
        lambda: fit(regression(), per_worker, class_weight={0: 1.0}),
        lambda: fit(regression(), lambda _: batches(40).repeat(), y),
        lambda: fit(regression(), ((x, y) for _ in range(5))),
        lambda: fit(regression(), lambda _: data.take(5)),
        predict_in_scope,
    ):
        try:
            use()
        except ValueError as error:
            refusals.append(str(error))
    return {"refusals": refusals}


def failing(x: Any, y: Any) -> Any:
    with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_sum(tf.abs(x)), 0.0, "a batch that is wrong")]):
        return x, tf.identity(y)


@case
def failures() -> Result:
    """A step that fails on a worker ends `fit` with its exception. Another `fit` works, and one whose data end too."""
    with strategy.scope():
        model = regression()
    message = ""
    try:
        fit(model, batches(40).repeat().map(failing))
    except Exception as error:  # noqa: BLE001 - Keras may wrap it in any exception
        message = str(error)
    again = fit(model, batches(40).repeat())
    ended = fit(regression(), by_function(lambda _: batches(40)), steps=50, epochs=1)
    return {"message": message, "again": again["history"]["samples"], "ended": ended["history"]["samples"]}


class UntilWorkerIsBack(keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow has no types
    """Ends training three epochs after a log has its second line that says that a server serves."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.log = pathlib.Path(log)
        self.left = 3

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.log.read_bytes().count(b"serves") > 1:
            self.left -= 1
        self.model.stop_training = self.left == 0


def lose_a_worker() -> Result:
    """Trains and validates until a worker has been lost and is back; every step counts once."""
    model = regression()
    data = {"validation_data": batches(37, seed=1), "validation_steps": 5}
    return fit(
        model, batches(80).repeat(), epochs=100_000, steps=20, callbacks=[UntilWorkerIsBack(sys.argv[3])], **data
    )


def main() -> None:
    if sys.argv[2:] and sys.argv[2].startswith("raise:"):
        CASES[sys.argv[2].partition(":")[2]]()
    elif sys.argv[2:3] == ["lose_a_worker"]:
        case(lose_a_worker)
        run_cases(sys.argv[2:3], OUT / "results.json")
    else:
        run_cases(sys.argv[2:] or list(CASES), OUT / "results.json")


main()
