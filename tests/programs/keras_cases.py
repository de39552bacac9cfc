"""Trains tiny models in many ways under one strategy, and writes the results as JSON: `keras_cases.py DIR [CASE…]`.

An ordinary user's script: it uses TF_CONFIG and tf.distribute, and runs alone as well as in a cluster, on
Keras 3 as well as on tf_keras (TF_USE_LEGACY_KERAS=1). Run by distlaunch with `--strategy mirrored` or
`central_storage`, it trains on several devices of one process. Data, initial weights and the order of the samples are
fixed, so that runs can be compared number by number. Every case builds its own model; a case that raises is
written with its traceback, and the next one runs. `keras_number_cases.py` has more cases.
"""

import sys
from typing import Any

import keras_number_cases  # noqa: F401 - its cases
import numpy as np
import tensorflow as tf
from keras_strategy import ALONE, EPOCHS, OWN, REPLICAS, TASK, fit, regression, strategy
from tiny_keras import (
    BATCH,
    CASES,
    LEGACY,
    OUT,
    Interrupt,
    InterruptionError,
    Result,
    Spread,
    case,
    dense,
    history,
    keras,
    numbers,
    run_cases,
    samples,
    weights,
)


@case
def plain_fit() -> Result:
    """`model.fit` on arrays that divide evenly, with a model that is not built yet."""
    return fit(regression(), *samples(32))


@case
def fit_on_dataset() -> Result:
    """A tf.data.Dataset of dictionaries, and a model with two inputs and two outputs."""
    x, y = samples(32)
    data = tf.data.Dataset.from_tensor_slices(({"left": x[:, :2], "right": x[:, 2:]}, {"sum": y, "half": y / 2})).batch(
        BATCH
    )
    with strategy.scope():
        inputs = {name: keras.Input((2,), name=name) for name in ("left", "right")}
        joined = keras.layers.Concatenate()([dense(3, "tanh")(inputs["left"]), dense(3)(inputs["right"])])
        outputs = {
            name: keras.layers.Dense(1, kernel_initializer=Spread(), name=name)(joined) for name in ("sum", "half")
        }
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.05), {"sum": "mse", "half": "mae"})
    fitted = model.fit(data, epochs=EPOCHS, verbose=0)
    predicted = model.predict(data, verbose=0)
    return {
        "history": history(fitted),
        "weights": weights(model),
        "predictions": {name: numbers(values) for name, values in predicted.items()},
    }


@case
def validation_data() -> Result:
    """Validation after each epoch; its last batch is one sample, so that one worker gets none."""
    return fit(regression(), *samples(32), validation_data=samples(17, seed=1))


@case
def evaluate() -> Result:
    """`model.evaluate` with uneven last batches of 5 samples, and of 1."""
    model = regression()
    result: Result = {}
    for count in (37, 33):
        logs = model.evaluate(*samples(count), batch_size=BATCH, verbose=0, return_dict=True)
        result[str(count)] = {name: float(value) for name, value in logs.items()}
    return result


@case
def predict() -> Result:
    """`model.predict`: all samples in their order, with last batches of 5 samples, and of 1."""
    model = regression(dense(1))
    result: Result = {}
    for count in (37, 33):
        x, _ = samples(count)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        kernel, bias = (np.asarray(weight) for weight in model.get_weights())
        result[str(count)] = {"predictions": numbers(predicted), "expected": numbers(x @ kernel + bias)}
    return result


@case
def uneven_fit() -> Result:
    """Last batches of 5 samples, which one process averages over 5 and two workers over 3 and over 2."""
    return fit(regression(), *samples(37))


@case
def uneven_fit_with_idle_worker() -> Result:
    """Last batches of a single sample: one worker gets it, the other nothing."""
    return fit(regression(), *samples(33))


def mean_of_means(count: int, workers: int = 2) -> Any:
    """Sample weights with which one process' mean over a batch is the mean of the workers' own means.

    Workers take equal parts of a batch, the last one what remains. A sample of a worker that has `own` of the
    batch's `all` samples counts 1 / (workers * own) there, and 1 / all in a plain mean.
    """
    weight = np.empty(count, "float32")
    for start in range(0, count, BATCH):
        everything = min(BATCH, count - start)
        part = -(-everything // workers)
        for first in range(0, everything, part):
            own = min(part, everything - first)
            weight[start + first : start + first + own] = everything / (workers * own)
    return weight


@case
def uneven_fit_as_mean_of_means() -> Result:
    """The equivalent of `uneven_fit` in one process."""
    return {} if not ALONE else fit(regression(), *samples(37), sample_weight=mean_of_means(37))


@case
def uneven_fit_with_idle_worker_as_mean_of_means() -> Result:
    """The equivalent of `uneven_fit_with_idle_worker` in one process."""
    return {} if not ALONE else fit(regression(), *samples(33), sample_weight=mean_of_means(33))


@case
def sample_weight() -> Result:
    """A weight for every sample, in the loss and in a weighted metric."""
    with strategy.scope():
        weighted = keras.metrics.MeanSquaredError(name="weighted")
    model = regression(weighted_metrics=[weighted])
    return fit(model, *samples(32), sample_weight=np.linspace(0.1, 2, 32, dtype="float32"))


@case
def class_weight() -> Result:
    """A weight for every class of a classifier."""
    x, y = samples(32)
    classes = np.digitize(y[:, 0], [-1, 1])
    with strategy.scope():
        model = keras.Sequential([dense(8, "tanh"), dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return fit(model, x, classes, class_weight={0: 1.0, 1: 3.0, 2: 0.25})


def normalized(count: int, **options: Any) -> Result:
    return normalized_by(keras.layers.BatchNormalization(momentum=0.8, **options), count)


def normalized_by(layer: Any, count: int, **fit_options: Any) -> Result:
    model = regression(dense(8), layer, dense(1), rate=0.02)
    x, y = samples(count)
    result = fit(model, x, y, **fit_options)
    first, first_bias, gamma, beta, mean, variance, last, last_bias = model.get_weights()
    expected = gamma * (x @ first + first_bias - mean) / np.sqrt(variance + layer.epsilon) + beta
    return {
        **result,
        "evaluated": numbers(model.evaluate(x, y, batch_size=BATCH, verbose=0)),
        "predictions": numbers(model.predict(x, batch_size=BATCH, verbose=0)),
        "expected": numbers(expected @ last + last_bias),
    }


@case
def batch_normalization() -> Result:
    """Plain BatchNormalization: each worker normalizes by its own half of the batch."""
    return normalized(32)


@case
def batch_normalization_with_idle_worker() -> Result:
    """Plain BatchNormalization with last batches that leave one worker idle."""
    return normalized(33)


class HalvedBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]  # no types
    """Normalizes each half of a batch by itself, and takes the mean of both for its moving statistics."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        if not training:
            return super().call(inputs, training=False)
        middle = (tf.shape(inputs)[0] + 1) // 2
        halves = [inputs[:middle], inputs[middle:]]
        moments = [self.moments_or_moving(half) for half in halves]
        mean, variance = (sum(values) / 2 for values in zip(*moments, strict=True))
        self.moving_mean.assign(self.moving_mean * self.momentum + mean * (1 - self.momentum))
        self.moving_variance.assign(self.moving_variance * self.momentum + variance * (1 - self.momentum))
        normalize = tf.nn.batch_normalization
        return tf.concat(
            [
                normalize(half, mean, variance, self.beta, self.gamma, self.epsilon)
                for half, (mean, variance) in zip(halves, moments, strict=True)
            ],
            0,
        )

    def moments_or_moving(self, half: Any) -> Any:
        moving = (self.moving_mean, self.moving_variance)
        return [
            tf.where(tf.size(half) > 0, moment, tf.convert_to_tensor(usual))
            for moment, usual in zip(tf.nn.moments(half, 0), moving, strict=True)
        ]


@case
def batch_normalization_by_halves() -> Result:
    """The equivalent of `batch_normalization` in one process."""
    return {} if not ALONE else normalized_by(HalvedBatchNormalization(momentum=0.8), 32)


@case
def batch_normalization_with_idle_worker_by_halves() -> Result:
    """The equivalent of `batch_normalization_with_idle_worker` in one process."""
    if not ALONE:
        return {}
    layer = HalvedBatchNormalization(momentum=0.8)
    return normalized_by(layer, 33, sample_weight=mean_of_means(33))


@case
def synchronized_batch_normalization() -> Result:
    """BatchNormalization(synchronized=True) normalizes by the whole batch."""
    return normalized(32, synchronized=True)


class OwnStep(keras.Sequential):  # type: ignore[misc]  # TensorFlow has no types
    """A model whose train_step returns other names than those of the compiled metrics."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {
            "own_error": tf.reduce_mean(tf.abs(y - predicted)),
            "own_loss": loss,
            "own_moments": tf.reduce_mean(predicted, axis=0),
        }


@case
def custom_train_step() -> Result:
    """Values computed by a custom train_step are averaged over the workers."""
    with strategy.scope():
        model = OwnStep([dense(8, "tanh"), dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = samples(32)
    fitted = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    logs = {name: [numbers(value) for value in values] for name, values in fitted.history.items()}
    return {"logs": logs, "weights": weights(model)}


@case
def steps_per_execution() -> Result:
    """Four steps per call of the compiled function, with five steps in an epoch."""
    model = regression(steps_per_execution=4)
    x, y = samples(40)
    return {
        **fit(model, x, y, validation_data=(x, y)),
        "predictions": numbers(model.predict(samples(37)[0], batch_size=BATCH, verbose=0)),
    }


@case
def gradient_accumulation() -> Result:
    """The optimizer applies the mean of two batches' gradients, which equals that of one batch twice as large."""
    model = regression()
    x, y = samples(48)
    with strategy.scope():
        options = {} if LEGACY else {"gradient_accumulation_steps": 2}  # tf_keras has no accumulation
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, **options), "mse")
    model.fit(x, y, batch_size=BATCH * (2 if LEGACY else 1), epochs=EPOCHS, shuffle=False, verbose=0)
    return {"weights": weights(model)}


@case
def mixed_precision() -> Result:
    """mixed_float16, which scales the loss."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return fit(regression(), *samples(32))
    finally:
        keras.mixed_precision.set_global_policy("float32")


@case
def mixed_precision_with_overflow() -> Result:
    """mixed_float16 where the gradients of one worker overflow: all workers have to skip the same steps."""
    x, y = samples(32)
    y[0] = 2000.0  # worker 0 has this sample
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = regression(rate=1e-5)
        return {**fit(model, x, y), "applied_steps": int(model.optimizer.iterations.numpy())}
    finally:
        keras.mixed_precision.set_global_policy("float32")


@case
def early_stopping() -> Result:
    """Training stops when the validation loss gets worse, and goes back to the best weights."""
    x, _ = samples(19, seed=1)
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    validation = (x, np.full((19, 1), 0.3, "float32"))  # the model fits this better for some epochs only
    result = fit(regression(), *samples(32), epochs=40, validation_data=validation, callbacks=[stopping])
    return {**result, "stopped_epoch": int(stopping.stopped_epoch)}


@case
def model_checkpoint() -> Result:
    """The best model and the weights of every epoch, each worker to its own files; both are read again."""
    best, latest = OWN / "best.keras", OWN / "latest.weights.h5"
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(best), monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(str(latest), save_weights_only=True),
    ]
    model = regression(rate=0.2)  # too fast, so that the best epoch is not the last
    passed: list[Any] = []
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: passed.append(weights(model))))
    result = {**fit(model, *samples(32), epochs=3, callbacks=callbacks), "passed": passed}
    if LEGACY and TASK != 0:  # tf_keras keeps only the chief's files
        return result
    saved = keras.models.load_model(str(best))
    reloaded = keras.models.clone_model(saved)
    reloaded.load_weights(str(latest))
    return {**result, "saved": weights(saved), "reloaded": weights(reloaded)}


def clipped(accumulated: int = 1, **clipping: Any) -> Result:
    """Clipping that affects most gradients, so that clipping each replica's part differs from clipping the sum."""
    model = regression()
    x, y = samples(16 * (accumulated + 1))
    if not LEGACY and accumulated > 1:  # tf_keras has no accumulation; a batch twice as large is the same
        clipping["gradient_accumulation_steps"] = accumulated
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, **clipping), "mse")
    model.fit(x, y, batch_size=BATCH * (accumulated if LEGACY else 1), epochs=EPOCHS, shuffle=False, verbose=0)
    return {"weights": weights(model)}


@case
def clipnorm() -> Result:
    """Every gradient is clipped to a norm."""
    return clipped(clipnorm=0.4)


@case
def clipvalue() -> Result:
    """Every number of the gradients is clipped."""
    return clipped(clipvalue=0.2)


@case
def global_clipnorm() -> Result:
    """All gradients together are clipped to a norm."""
    return clipped(global_clipnorm=0.7)


@case
def clipnorm_with_accumulation() -> Result:
    """Clips the mean of two batches' gradients."""
    return clipped(accumulated=2, clipnorm=0.4)


@case
def clipvalue_of_nadam() -> Result:
    """Nadam has its own update step around the common one."""
    model = regression(dense(1))
    with strategy.scope():
        model.compile(keras.optimizers.Nadam(0.01, clipvalue=0.2), "mse")
    return {"weights": fit(model, *samples(32))["weights"]}


@case
def clipnorm_with_mixed_precision() -> Result:
    """Clips gradients after they have been unscaled."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return clipped(clipnorm=0.4)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@case
def global_clipnorm_of_embedding() -> Result:
    """The gradients of an embedding are rows, some of them of the same word."""
    words = np.random.RandomState(2).randint(0, 3, (16, 2))
    with strategy.scope():
        embedding = keras.layers.Embedding(3, 4, embeddings_initializer=Spread())
        model = keras.Sequential([embedding, keras.layers.Reshape((8,)), dense(1)])
        model.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.3), "mse")
    model.fit(
        words, words.sum(1, keepdims=True).astype("float32"), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0
    )
    return {"weights": weights(model)}


class AppliedStep(keras.Sequential):  # type: ignore[misc]  # TensorFlow has no types
    """A model whose train_step calls `optimizer.apply` and computes its own loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True))) / REPLICAS
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        if LEGACY:
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            self.optimizer.apply(gradients, variables)
        return {"loss": loss * REPLICAS}


@case
def global_clipnorm_in_own_step() -> Result:
    """A custom train_step with `optimizer.apply`."""
    with strategy.scope():
        model = AppliedStep([dense(8, "tanh"), dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.7))
    model.fit(*samples(32), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return {"weights": weights(model)}


@case
def loop_of_its_own() -> Result:
    """A custom loop in a tf.function, in which the optimizer is used for the first time."""
    x, y = samples(32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), dense(8, "tanh"), dense(1)])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.7)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - model(x, training=True))) / REPLICAS
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def train(x: Any, y: Any) -> None:
        strategy.run(step, args=(x, y))

    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    for _ in range(3):
        for x, y in batches:
            train(x, y)
    return {"weights": weights(model)}


def averaged(**options: Any) -> Result:
    model = regression()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8, **options), "mse")
    fitted = fit(model, *samples(32))
    return {"weights": fitted["weights"]}


@case
def moving_average() -> Result:
    """The weights' moving average takes their place at the end."""
    return averaged()


@case
def moving_average_with_overwrite() -> Result:
    """The weights' moving average takes their place every three steps."""
    return averaged(ema_overwrite_frequency=3)


@case
def metrics_of_all_kinds() -> Result:
    """Metrics that add to their state, and metrics that assign it."""
    x, y = samples(32)
    labels = (y > 0).astype("float32")
    with strategy.scope():
        metrics = [
            keras.metrics.BinaryAccuracy(name="accuracy"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.AUC(num_thresholds=20, name="auc"),
            keras.metrics.F1Score(threshold=0.5, name="f1"),
            keras.metrics.BinaryIoU(name="iou"),
        ]
        model = keras.Sequential([dense(8, "tanh"), dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
    fitted = model.fit(
        x, labels, validation_data=(x[:17], labels[:17]), batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    )
    logs = {name: [numbers(value) for value in values] for name, values in fitted.history.items()}
    return {"logs": logs, "weights": weights(model)}


class Adversaries(keras.Model):  # type: ignore[misc]  # TensorFlow has no types
    """Two models that train each other; as a whole they have no `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), dense(4, "tanh"), dense(4)])
        self.discriminator = keras.Sequential([keras.Input((4,)), dense(4, "tanh"), dense(1)])
        self.error = keras.metrics.Mean(name="error")

    def compile(self) -> None:
        super().compile()
        self.first = keras.optimizers.Adam(0.01)
        self.second = keras.optimizers.SGD(0.02, global_clipnorm=0.5)

    @property
    def metrics(self) -> list[Any]:
        return [self.error]

    def train_step(self, real: Any) -> Any:
        made = self.generator(real[:, :2])
        with tf.GradientTape() as tape:
            told = self.discriminator(tf.concat([real, made], 0))
            loss = tf.reduce_mean(tf.square(told[: tf.shape(real)[0]] - 1)) + tf.reduce_mean(
                tf.square(told[tf.shape(real)[0] :])
            )
            scaled = loss / REPLICAS
        variables = self.discriminator.trainable_variables
        self.first.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            scaled = tf.reduce_mean(tf.square(self.discriminator(self.generator(real[:, :2])) - 1)) / REPLICAS
        variables = self.generator.trainable_variables
        self.second.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        self.error.update_state(loss)
        return {"error": self.error.result()}


@case
def adversaries() -> Result:
    """A model of two models and two optimizers, with a train_step, and without a `call`."""
    with strategy.scope():
        model = Adversaries()
        model.compile()
    fitted = model.fit(samples(32)[0], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return {"history": history(fitted), "weights": weights(model.generator) + weights(model.discriminator)}


@case
def backup_and_restore() -> Result:
    """A fit is interrupted after two epochs; another one resumes, and ends as if nothing had happened."""
    directory = OUT / "backup"  # of all workers
    x, y = samples(32)

    def run(*more: Any) -> Result:
        model = regression(build=True)
        backup = keras.callbacks.BackupAndRestore(str(directory))
        return fit(model, x, y, epochs=5, callbacks=[backup, *more])

    try:
        run(Interrupt())
    except InterruptionError:
        interrupted = True
    resumed = run()
    return {"interrupted": interrupted, **resumed, "uninterrupted": fit(regression(), x, y, epochs=5)}


OWN.mkdir(parents=True, exist_ok=True)
sys.exit(not run_cases(sys.argv[2:] or list(CASES), OUT / f"results-{TASK}.json", replicas=REPLICAS))
