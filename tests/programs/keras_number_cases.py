"""More cases of `keras_cases.py`: losses, metrics, random numbers, data that can be read once, layers' own state."""

import contextlib
import itertools
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from keras_strategy import ALONE, EPOCHS, REPLICAS, TASK, fit, regression, strategy
from tiny_keras import (
    BATCH,
    LEGACY,
    MUON,
    OUT,
    Interrupt,
    InterruptionError,
    OwnState,
    Result,
    Spread,
    case,
    dense,
    history,
    keras,
    numbers,
    samples,
    weights,
)


def compiled(loss: Any, *, rate: float = 0.05) -> Any:
    with strategy.scope():
        model = keras.Sequential([dense(8, "tanh"), dense(1)])
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss)
    return model


class Squares(keras.losses.Loss):  # type: ignore[misc]  # TensorFlow has no types
    """Squared errors with the given number of axes: 0 (the mean), 1 (of each sample) or 2."""

    def __init__(self, rank: int, reduction: Any) -> None:
        super().__init__(reduction=reduction)
        self.rank = rank

    def call(self, y_true: Any, y_pred: Any) -> Any:
        squares = tf.square(tf.cast(y_true, y_pred.dtype) - y_pred)
        if self.rank == 0:
            return tf.reduce_sum(squares) if self.reduction == "sum" else tf.reduce_mean(squares)
        return tf.reduce_mean(squares, -1) if self.rank == 1 else squares


def with_loss(rank: int, reduction: Any, count: int = 4 * BATCH, rate: float = 0.05) -> Result:
    return fit(
        compiled(Squares(rank, reduction), rate=rate), *samples(count), validation_data=samples(2 * BATCH, seed=1)
    )


@case
def loss_of_one_number() -> Result:
    """A function that computes the mean by itself."""
    loss = lambda y, p: tf.reduce_mean(tf.square(y - p))  # noqa: E731 - as a user writes it
    return fit(compiled(loss), *samples(4 * BATCH), validation_data=samples(2 * BATCH, seed=1))


@case
def loss_of_rank_0() -> Result:
    return with_loss(0, "sum_over_batch_size")


@case
def loss_of_rank_0_summed() -> Result:
    return with_loss(0, "sum", rate=0.005)


@case
def loss_of_rank_1_summed() -> Result:
    return with_loss(1, "sum", rate=0.005)


@case
def loss_of_rank_1_unreduced() -> Result:
    """The gradient is that of the sum; the loss that Keras shows is the mean."""
    return with_loss(1, None if not LEGACY else "none", rate=0.005)


def roots(y: Any, p: Any) -> Any:
    """The mean of the roots of the mean squares of each half of a batch, or of one half: what two replicas train."""
    halves = tf.split(y - p, 2) if ALONE else [y - p]
    return sum(tf.sqrt(tf.reduce_mean(tf.square(half))) for half in halves) / len(halves)


@case
def loss_that_is_no_mean() -> Result:
    """Two replicas train by the mean of their values."""
    return fit(compiled(roots), *samples(4 * BATCH))


@case
def loss_of_rank_2() -> Result:
    return with_loss(2, "sum_over_batch_size")


@case
def loss_of_rank_2_summed() -> Result:
    return with_loss(2, "sum", rate=0.005)


@case
def loss_of_rank_2_unreduced() -> Result:
    return with_loss(2, None if not LEGACY else "none", rate=0.005)


@case
def losses_of_several_outputs() -> Result:
    """A loss of each kind for each output, with weights, and a metric of one number."""
    x, y = samples(4 * BATCH)
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = dense(4, "tanh")(inputs)
        outputs = {
            name: keras.layers.Dense(1, kernel_initializer=Spread(), name=name)(hidden) for name in ("a", "b", "c")
        }
        model = keras.Model(inputs, outputs)
        losses = {"a": Squares(0, "sum_over_batch_size"), "b": "mse", "c": Squares(1, "sum")}
        weigh = {"a": 0.5, "b": 1.0, "c": 0.1}
        model.compile(keras.optimizers.SGD(0.02), losses, loss_weights=weigh)
    fitted = model.fit(x, {"a": y, "b": y / 2, "c": -y}, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return {"history": history(fitted), "weights": weights(model)}


class Penalty(keras.layers.Layer):  # type: ignore[misc]  # TensorFlow has no types
    """Adds the mean of its input's squares to the loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
        return inputs


def penalized(count: int) -> Result:
    with strategy.scope():
        layers = [dense(8, "tanh"), Penalty(), keras.layers.Dense(1, kernel_initializer=Spread())]
        model = keras.Sequential(layers)
        loss = lambda y, p: tf.reduce_mean(tf.square(y - p))  # noqa: E731 - as a user writes it
        error = lambda y, p: tf.reduce_mean(tf.abs(y - p))  # noqa: E731 - as above
        model.compile(keras.optimizers.SGD(0.05), loss, metrics=[error])
    result = fit(model, *samples(count), validation_data=samples(count, seed=1))
    result["history"] = {name.replace("<lambda>", "error"): values for name, values in result["history"].items()}
    return result


@case
def numbers_of_own_functions() -> Result:
    """A loss, a metric and an additional loss that are one number each."""
    return penalized(4 * BATCH)


@case
def numbers_of_own_functions_with_idle_worker() -> Result:
    """The same; no mean can be computed where a worker has no sample."""
    return penalized(4 * BATCH + 1)


@case
def state_of_an_own_layer() -> Result:
    return fit(regression(dense(4, "tanh"), OwnState(), dense(1)), *samples(4 * BATCH))


@case
def state_of_an_own_layer_with_idle_worker() -> Result:
    return fit(regression(dense(4, "tanh"), OwnState(), dense(1)), *samples(4 * BATCH + 1))


class EachBatch(keras.callbacks.Callback):  # type: ignore[misc]  # TensorFlow has no types
    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, list[float]] = {}

    def note(self, prefix: str, logs: Any) -> None:
        for name, value in logs.items():
            self.logs.setdefault(prefix + name, []).extend(numbers(value))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("", logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note("val_", logs)


@case
def logs_of_each_batch() -> Result:
    """The logs that callbacks get after a batch, also of metrics that are not means."""
    x, y = samples(4 * BATCH)
    labels = (y > 0).astype("float32")
    with strategy.scope():
        metrics = [
            keras.metrics.TruePositives(name="hits"),
            keras.metrics.AUC(num_thresholds=20, name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.RootMeanSquaredError(name="rmse"),
            "accuracy",
        ]
        model = keras.Sequential([dense(8, "tanh"), dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
    each = EachBatch()
    model.fit(
        x,
        labels,
        validation_data=(x[:17], labels[:17]),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[each],
    )
    return {"logs": each.logs}


class Pair(keras.Model):  # type: ignore[misc]  # TensorFlow has no types
    """A GAN as in the guides of Keras: its losses are those of Keras, and its train_step returns them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), dense(4, "tanh"), dense(4)])
        self.discriminator = keras.Sequential([keras.Input((4,)), dense(4, "tanh"), dense(1)])
        self.hits = keras.metrics.BinaryAccuracy(name="hits", threshold=0.0)
        self.tracker = keras.metrics.Mean(name="tracked")

    def compile(self) -> None:
        super().compile()
        self.first, self.second = keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.02)
        reduction = {"reduction": "sum_over_batch_size"} if not LEGACY else {}
        self.error = keras.losses.BinaryCrossentropy(from_logits=True, **reduction)

    def call(self, inputs: Any) -> Any:
        return self.generator(inputs)

    def train_step(self, real: Any) -> Any:
        made = self.generator(real[:, :2])
        half = tf.shape(real)[0]
        labels = tf.concat([tf.ones((half, 1)), tf.zeros((half, 1))], 0)
        with tf.GradientTape() as tape:
            told = self.discriminator(tf.concat([real, made], 0))
            d_loss = self.error(labels, told)
        variables = self.discriminator.trainable_variables
        self.first.apply_gradients(zip(tape.gradient(d_loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.error(tf.ones((half, 1)), self.discriminator(self.generator(real[:, :2])))
        variables = self.generator.trainable_variables
        self.second.apply_gradients(zip(tape.gradient(g_loss, variables), variables, strict=True))
        self.hits.update_state(labels, told)
        self.tracker.update_state(d_loss)
        return {"d_loss": d_loss, "g_loss": g_loss, "hits": self.hits.result(), "tracked": self.tracker.result()}


@case
def losses_that_a_step_returns() -> Result:
    with strategy.scope():
        model = Pair()
        model.compile()
    each = EachBatch()
    model.fit(samples(4 * BATCH)[0], batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[each])
    return {"logs": each.logs, "weights": weights(model.generator) + weights(model.discriminator)}


class Unaware(keras.Sequential):  # type: ignore[misc]  # TensorFlow has no types
    """A model whose loss is its own, and not divided by the number of models that train it."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


@case
def loss_that_a_step_does_not_divide() -> Result:
    """Its gradient is added up; one process gets the same with a learning rate that is as many times as high."""
    with strategy.scope():
        model = Unaware([dense(8, "tanh"), dense(1)])
        model.compile(keras.optimizers.SGD(0.02 if ALONE else 0.01))
    return fit(model, *samples(4 * BATCH))


def batches(count: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    x, y = samples(count * BATCH, seed)
    for first in range(0, count * BATCH, BATCH):
        yield x[first : first + BATCH], y[first : first + BATCH]


@case
def generator() -> Result:
    """Generators of batches, which can be read once: to evaluate, to train, to validate, to predict."""
    model = regression()
    evaluated = numbers(model.evaluate(batches(4), verbose=0))
    fitted = model.fit(batches(5), validation_data=batches(3, seed=1), epochs=1, verbose=0)
    predicted = model.predict(((x,) for x, _ in batches(3)), verbose=0)
    return {
        "evaluated": evaluated,
        "history": history(fitted),
        "weights": weights(model),
        "predicted": numbers(predicted),
    }


@case
def generator_over_epochs() -> Result:
    """A generator of all epochs' batches."""
    model = regression()
    fitted = model.fit(batches(6), steps_per_epoch=2, epochs=3, verbose=0)
    return {"history": history(fitted), "weights": weights(model)}


def aligned(values: Any) -> Any:
    """A copy whose memory TensorFlow uses as it is."""
    memory = np.empty(values.nbytes + 64, "uint8")
    first = -memory.ctypes.data % 64
    copy = memory[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


class Rows(keras.utils.PyDataset if not LEGACY else object):  # type: ignore[misc]  # TensorFlow has no types
    """Batches that are parts of two arrays."""

    def __init__(self, x: Any, y: Any, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        rows = slice(number * BATCH, (number + 1) * BATCH)
        return self.x[rows], self.y[rows]


@case
def rows_of_threads() -> Result:
    """A PyDataset that threads read, once for each epoch; its arrays stay as they are."""
    x, y = (aligned(values) for values in samples(4 * BATCH))
    before = x.copy(), y.copy()
    model = regression()
    fitted = model.fit(Rows(x, y, workers=2), epochs=4, shuffle=False, verbose=0)
    changed = int((x != before[0]).sum() + (y != before[1]).sum())
    return {"history": history(fitted), "weights": weights(model), "changed": changed}


@case
def shuffled() -> Result:
    """A pipeline that is shuffled anew for each epoch, for two calls of fit and one of evaluate."""
    x, y = samples(4 * BATCH)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=5).batch(BATCH)
    model = regression()
    first = model.fit(data, epochs=3, verbose=0)
    second = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return {"first": history(first), "second": history(second), "weights": weights(model)}


@case
def stream() -> Result:
    """A tf.data pipeline over one stream of samples, which cannot be started again."""
    x, y = samples(5 * BATCH)
    rows = iter(zip(x, y, strict=True))
    data = tf.data.Dataset.from_generator(
        lambda: rows, output_signature=(tf.TensorSpec((4,), "float32"), tf.TensorSpec((1,), "float32"))
    )
    model = regression()
    fitted = model.fit(data.batch(BATCH), epochs=1, verbose=0)
    return {"history": history(fitted), "weights": weights(model)}


@case
def predict_on_batch() -> Result:
    """Each row once, by all functions that take a whole batch."""
    x, _ = samples(6)
    model = regression(build=True)
    result = {"on_batch": numbers(model.predict_on_batch(x))}
    model.make_predict_function()
    result["by_hand"] = numbers(model.predict_function([(tf.constant(x),)]))
    result["predict"] = numbers(model.predict(x, batch_size=4, verbose=0))
    return result


@case
def train_on_batch() -> Result:
    """A loop of the program's own, which passes the same batches on each worker."""
    model = regression()
    x, y = samples(4 * BATCH)
    for first in range(0, len(x), BATCH):
        logs = model.train_on_batch(x[first : first + BATCH], y[first : first + BATCH], return_dict=True)
    tested = model.test_on_batch(x[:7], y[:7], return_dict=True)
    return {
        "weights": weights(model),
        "logs": {name: float(value) for name, value in logs.items()},
        "tested": {name: float(value) for name, value in tested.items()},
    }


class SumOfRow(keras.layers.Layer):  # type: ignore[misc]  # TensorFlow has no types
    def call(self, inputs: Any) -> Any:
        return tf.reduce_sum(inputs, 1, keepdims=True)


@case
def sparse_rows() -> Result:
    """Sparse tensors."""
    x, y = samples(4 * BATCH)
    with strategy.scope():
        inputs = keras.Input((4,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=Spread())(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(np.where(abs(x) > 0.5, x, 0)), y)).batch(BATCH)
    result = {"history": history(model.fit(data, epochs=EPOCHS, verbose=0)), "weights": weights(model)}
    return {
        **result,
        "evaluated": numbers(model.evaluate(data, verbose=0)),
        "predicted": numbers(model.predict(data.map(lambda x, _: x), verbose=0)),
    }


@case
def ragged_rows() -> Result:
    """Rows of different lengths."""
    x, y = samples(4 * BATCH)
    rows = tf.ragged.constant([row[: 1 + number % 4].tolist() for number, row in enumerate(x)], dtype="float32")
    with strategy.scope():
        inputs = keras.Input((None,), ragged=True)
        model = keras.Model(inputs, dense(1)(SumOfRow()(inputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    data = tf.data.Dataset.from_tensor_slices((rows, y)).batch(BATCH)
    return {"history": history(model.fit(data, epochs=EPOCHS, verbose=0)), "weights": weights(model)}


class Draws(keras.layers.Layer):  # type: ignore[misc]  # TensorFlow has no types
    """Applies a Dropout to ones, and adds noise that a generator without a seed of its own draws."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.noise = keras.layers.GaussianNoise(1.0, seed=4)

    def call(self, inputs: Any, training: Any = None) -> Any:
        ones = self.dropout(tf.ones_like(inputs), training=True)
        return tf.concat([ones, self.noise(inputs, training=True)], 1)


@case
def random_layers() -> Result:
    """The random numbers of each row of a batch, drawn twice, and again after the state was restored."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((16,)), Draws()])

    def draw() -> list[float]:
        return numbers(model.predict(np.ones((2 * REPLICAS, 16), "float32"), batch_size=2 * REPLICAS, verbose=0))

    first = draw()
    before = [variable.numpy() for variable in model.variables]
    second = draw()
    state = [numbers(variable) for variable in model.variables]
    for variable, value in zip(model.variables, before, strict=True):
        variable.assign(value)
    return {"first": first, "second": second, "restored": draw(), "state": state}


class Noise(keras.layers.Layer):  # type: ignore[misc]  # TensorFlow has no types
    """Draws numbers without a seed."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(tf.shape(inputs))


@case
def random_numbers_without_a_seed() -> Result:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Noise()])
    zeros = np.zeros((2 * REPLICAS, 3), "float32")
    return {"drawn": [numbers(model.predict(zeros, batch_size=len(zeros), verbose=0)) for _ in range(2)]}


@case
def random_augmentation() -> Result:
    """A random number for each sample, drawn in a map of tf.data."""
    noise = keras.random.SeedGenerator(7)
    data = tf.data.Dataset.range(32).map(lambda _: keras.random.uniform((), seed=noise)).batch(BATCH)
    drawn = [strategy.gather(batch, axis=0) for batch in strategy.experimental_distribute_dataset(data)]
    return {"drawn": numbers(tf.concat(drawn, 0))}


@case
def random_initial_weights() -> Result:
    """Layers that are created in a step: all replicas start with the same weights."""

    class Late(keras.Model):  # type: ignore[misc]  # TensorFlow has no types
        def train_step(self, data: Any) -> Any:
            if not hasattr(self, "late"):
                self.late = keras.layers.Dense(1)
                self.late.build((None, 4))
            return {"sum": tf.reduce_sum(self.late(data))}

    with strategy.scope():
        model = Late()
        model.compile()
    model.fit(samples(BATCH)[0], batch_size=BATCH, epochs=1, verbose=0)
    copies = [strategy.experimental_local_results(variable.value) for variable in model.late.variables]
    return {"copies": [[numbers(copy) for copy in each] for each in copies]}


@case
def objects_from_outside_of_the_scope() -> Result:
    """Layers that are built, an optimizer and metrics, all made and compiled outside of the strategy's scope."""
    x, y = samples(4 * BATCH)
    first, own = dense(8, "tanh"), OwnState()
    first.build((None, 4))
    own.build((None, 8))
    optimizer, metric = keras.optimizers.Adam(0.05), keras.metrics.RootMeanSquaredError()
    with strategy.scope():
        model = keras.Sequential([first, own, dense(1)])
    model.compile(optimizer, "mse", metrics=[metric])
    before = numbers(model.predict(x, batch_size=BATCH, verbose=0))
    fitted = fit(model, x, y, validation_data=samples(2 * BATCH, seed=1))
    return {**fitted, "before": before, "after": numbers(model.predict(x, batch_size=BATCH, verbose=0))}


@case
def numbers_of_variables() -> Result:
    """The numbers that callbacks read from the optimizer."""
    model = regression(build=True)
    fit(model, *samples(4 * BATCH))
    return {
        "steps": int(model.optimizer.iterations),
        "rate": float(model.optimizer.learning_rate),
        "state": numbers(model.optimizer.learning_rate),
    }


def interrupted(folder: str, *, has_backup: bool) -> Result:
    """A fit that is interrupted after two epochs, and one that resumes; only some workers may have the callback."""
    x, y = samples(4 * BATCH)
    written = []

    def run(*more: Any) -> Result:
        backup = [keras.callbacks.BackupAndRestore(folder)] if has_backup else []
        return fit(regression(build=True), x, y, epochs=5, callbacks=[*backup, *more])

    try:
        run(Interrupt())
    except InterruptionError:
        written = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return {**run(), "files": len(written)}


@case
def backup_of_the_chief_alone() -> Result:
    return interrupted(str(OUT / "chiefs"), has_backup=TASK == 0)


@case
def backup_of_another_worker_alone() -> Result:
    """Only the chief's backup counts, so there is none."""
    return interrupted(str(OUT / "others"), has_backup=TASK == 1)


@case
def backup_in_a_folder_with_a_slash() -> Result:
    """A path that ends with a slash, where only the chief can write temporary files."""
    before, tempfile.tempdir = tempfile.tempdir, tempfile.gettempdir() if TASK == 0 else "/nowhere"
    try:
        result = interrupted(f"{OUT}/slash/", has_backup=True)
    finally:
        tempfile.tempdir = before
    beside = [name for name in os.listdir(OUT) if name.startswith("slash") and name != "slash"]
    return {**result, "beside": len(beside)}


@case
def checkpoints_without_temporary_files() -> Result:
    """The workers that do not write need no space for temporary files."""
    before, tempfile.tempdir = tempfile.tempdir, tempfile.gettempdir() if TASK == 0 else "/nowhere"
    try:
        saving = keras.callbacks.ModelCheckpoint(str(OUT / "best.keras"), monitor="loss", save_best_only=True)
        board = keras.callbacks.TensorBoard(str(OUT / "board"), histogram_freq=1, update_freq=2, profile_batch=2)
        logging = keras.callbacks.CSVLogger(str(OUT / "log.csv"))
        result = fit(regression(), *samples(4 * BATCH), callbacks=[saving, board, logging])
    finally:
        tempfile.tempdir = before
    result["rows"] = len((OUT / "log.csv").read_text().splitlines())
    result["events"] = len(list((OUT / "board" / "train").glob("events*")))
    return {**result, "best": float(saving.best), "saved": weights(keras.models.load_model(str(OUT / "best.keras")))}


class OrbaxStandIn:
    """Writes a file for each step. `orbax.checkpoint.v1.training.Checkpointer` writes a folder, and needs JAX."""

    def __init__(self, directory: str, **_: Any) -> None:
        self.directory = directory

    def save_checkpointables(self, step: int, _: Any) -> None:
        os.makedirs(self.directory, exist_ok=True)
        with open(os.path.join(self.directory, f"{step} by {TASK}"), "x", encoding="utf-8"):
            pass

    def close(self) -> None:
        pass


def stand_in_for_orbax() -> None:
    space = types.SimpleNamespace
    policies = space(LatestN=lambda _: None, FixedIntervalPolicy=lambda _: None)
    training = space(Checkpointer=OrbaxStandIn, preservation_policies=policies, save_decision_policies=policies)
    package, module = types.ModuleType("orbax"), types.ModuleType("orbax.checkpoint")
    vars(module)["v1"] = space(training=training, Context=contextlib.nullcontext)
    sys.modules.update({"orbax": package, "orbax.checkpoint": module})


@case
def orbax_checkpoints() -> Result:
    """The workers that have written the steps of OrbaxCheckpoint, which reads the metrics, too."""
    stand_in_for_orbax()
    folder = str(OUT / "orbax")
    saving = keras.callbacks.OrbaxCheckpoint(folder, monitor="loss", save_on_background=False)
    result = fit(regression(), *samples(4 * BATCH), callbacks=[saving])
    return {**result, "writers": [int(name.split()[-1]) for name in sorted(os.listdir(folder))]}


OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion"),
    *(*MUON, "Nadam", "RMSprop", "SGD"),
)
CLIPPING: list[dict[str, float]] = [{}, {"clipnorm": 0.4}, {"clipvalue": 0.2}, {"global_clipnorm": 0.7}]
ACCUMULATION: list[dict[str, int]] = [{}, {"gradient_accumulation_steps": 2}]
AVERAGING: list[dict[str, Any]] = [
    {},
    {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
]
STEPS = 5


def optimized(name: str, options: dict[str, Any]) -> list[list[float]]:
    """Two weights after an optimizer's updates, where each replica has another part of the same gradients."""
    with strategy.scope():
        layer = dense(3)
        layer.build((None, 4))
        optimizer = getattr(keras.optimizers, name)(learning_rate=0.05, **options)
        optimizer.build(layer.trainable_variables)
    random = np.random.RandomState(5)
    kernel = random.normal(size=(STEPS, 4, 3)).astype("float32")
    bias = random.normal(size=(STEPS, 3)).astype("float32")

    def update(step: Any) -> None:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = 2 * (tf.cast(number, "float32") + 1) / (REPLICAS * (REPLICAS + 1))
        optimizer.apply([tf.gather(kernel, step) * share, tf.gather(bias, step) * share], layer.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def run(step: Any) -> None:
        strategy.run(update, args=(step,))

    for step in range(STEPS):
        run(tf.constant(step))
    optimizer.finalize_variable_values(layer.trainable_variables)
    return weights(layer)


def train_with(options_of: Callable[[int], Iterable[dict[str, Any]]]) -> Result:
    results: Result = {}
    for number, name in enumerate(OPTIMIZERS if not LEGACY else ()):
        for options in options_of(number):
            words = [name, *(f"{key}={value}" for key, value in options.items())]
            results[" ".join(words)] = optimized(name, options)
    return results


OPTIONS = [
    {key: value for part in parts for key, value in part.items()}
    for parts in itertools.product(CLIPPING, ACCUMULATION, AVERAGING)
]


@case
def optimizers() -> Result:
    """All optimizers with all kinds of clipping, accumulation and averaging of the weights."""
    return train_with(lambda _: OPTIONS)


@case
def optimizers_with_some_options() -> Result:
    """All optimizers, and all these options, a quarter of them with each optimizer."""
    return train_with(lambda number: OPTIONS[number % 4 :: 4])
