"""The cost of step counting for a Keras training step: models with and without it, in turn in the same processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.pairs import Pair, Row

PROGRAM = """
import contextlib, json, os, sys, time
import keras, numpy as np, tensorflow as tf
from keras.src.callbacks.callback_list import CallbackList
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher

HOOKED = [(CallbackList, name) for name in vars(CallbackList) if hasattr(getattr(CallbackList, name), "__wrapped__")]
HOOKED += [(OwnedIterator, name) for name in ("__next__", "get_next", "get_next_as_optional")]
HOOKED += [(CollectiveReplicaLauncher, "all_reduce")]
assert len(HOOKED) == 11, HOOKED

@contextlib.contextmanager
def without():
    hooks = [(where, name, getattr(where, name)) for where, name in HOOKED]
    for where, name, hook in hooks:
        setattr(where, name, hook.__wrapped__)
    try:
        yield
    finally:
        for where, name, hook in hooks:
            setattr(where, name, hook)

width, steps, rounds = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
strategy = tf.distribute.MultiWorkerMirroredStrategy()

def build():
    with strategy.scope():
        hidden = [keras.layers.Dense(width, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((32,)), *hidden, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model

x = np.random.default_rng(1).normal(size=(64, 32)).astype("float32")
data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat().prefetch(2)

def fit(model):
    began = []
    clock = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: began.append(time.perf_counter()))
    model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0, callbacks=[clock])
    return (time.perf_counter() - began[0]) / steps

counted, plain = build(), build()
times = []
for number in range(rounds + 1):
    one = fit(counted) if number % 2 else None
    with without():
        other = fit(plain)
    one = fit(counted) if one is None else one
    times += [(one, other)] if number else []
if os.environ.get("DISTLAUNCH_TASK", "worker:0") == "worker:0":
    with open(sys.argv[4], "w") as file:
        json.dump(times, file)
"""
UNCOUNTED = "the same, uncounted"
ALONE = Row("a counted step of `model.fit`, tiny model, 1 worker", UNCOUNTED)
TOGETHER = Row("a counted step of `model.fit`, tiny model, 2 workers", UNCOUNTED)


def measure(runs: int) -> Iterator[Pair]:
    print("a Keras training step with steps counted; rival: the same, uncounted (goal: ratio at most 1.01)")
    rounds = 10 * runs
    for workers, width, steps, what, row in (
        (1, 64, 1000, "tiny", ALONE),
        (2, 64, 100, "tiny", TOGETHER),
        (2, 1024, 15, "3 M weights", None),
    ):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "fit.py").write_text(PROGRAM)
            arguments = [str(width), str(steps), str(rounds), f"{folder}/times.json"]
            command = [sys.executable, "-m", "launcher", "local", "-n", str(workers), "--run-dir", "run", "fit.py"]
            subprocess.run([*command, *arguments], cwd=folder, check=True, capture_output=True)
            times = json.loads((Path(folder) / "times.json").read_text())
        ours, rival = ([1000 * seconds for seconds in side] for side in zip(*times, strict=True))
        yield Pair(f"{workers} worker{'s'[: workers > 1]}, {what}", ours, rival, "ms", row)
