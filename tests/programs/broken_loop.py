"""A training loop with MultiWorkerMirroredStrategy, and the fault of `broken` in it."""

import broken

broken.at("start")

import json  # noqa: E402 - a failure before the import is one of the faults
import os  # noqa: E402

import tensorflow as tf  # noqa: E402

cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
host = cluster["worker"][broken.INDEX].rpartition(":")[0]
if broken.due("wrong-port", "cluster"):
    cluster["worker"][broken.INDEX] = f"{host}:9"
if broken.due("bad-port", "cluster"):
    cluster["worker"][broken.INDEX] = f"{host}:http"
resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
    tf.train.ClusterSpec(cluster), task_type="worker", task_id=broken.INDEX, rpc_layer="grpc"
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)  # fault: bad-port
broken.at("ready")


def load(step: int) -> float:
    broken.at("data", int(step))
    return 1.0


def call_layer(step: int) -> float:
    broken.at("layer", int(step))
    return 1.0


steps = broken.STEPS
if broken.due("fewer-batches", "data"):
    steps -= 10
if broken.due("more-batches", "data"):
    steps += 10
data = tf.data.Dataset.range(steps).map(
    lambda step: (step, tf.ensure_shape(tf.numpy_function(load, [step], tf.double), []))
)


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def reduce(value: tf.Tensor) -> tf.Tensor:
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.identity(value)))


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def train(step: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    gain = tf.ensure_shape(tf.numpy_function(call_layer, [step], tf.double), [])
    return reduce(tf.fill([4], batch * gain))


def train_step(step: tf.Tensor, batch: tf.Tensor) -> None:
    broken.at("train-step", int(step))
    if broken.due("skipped-step", "train-step", int(step)):
        return
    if broken.due("other-shape", "train-step", int(step)):
        reduce(tf.ones([5], tf.double))  # fault: other-shape
    elif broken.due("evaluate-alone", "train-step", int(step)):
        reduce(tf.ones([], tf.double))  # fault: evaluate-alone
    else:
        train(step, batch)


for step, batch in data:
    try:
        train_step(step, batch)
    except Exception as error:
        if broken.WRAPS:
            raise RuntimeError(f"step {int(step)} failed") from error
        raise
    if int(step) % 10 == 0:
        print(f"step {int(step)}", flush=True)
    broken.at("step", int(step))
    if broken.due("checkpoint-on-full-disk", "step", int(step)):
        tf.io.write_file("/dev/full", tf.strings.reduce_join(tf.fill([1 << 20], "x")))  # fault: checkpoint-on-full-disk
broken.at("end")
print("done", flush=True)
