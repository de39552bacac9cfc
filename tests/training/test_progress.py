"""The progress of training is reported without a call in the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.available import needs_tf_keras
from tests.harness.processes.commands import Distlaunch

COVERS = (
    "worker_entry/task",
    "worker_entry/hooks",
    "worker_entry/progress.py",
    "worker_entry/agent/tasks/status_reader.py",
)

FIT = """
import sys, numpy as np
if sys.argv[1] == "tf_keras":
    import tf_keras as keras
else:
    import keras
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse", **({"steps_per_execution": 5} if sys.argv[1] == "many" else {}))
x = np.ones((80, 4), "float32")
model.fit(x, x[:, :1], epochs=3, batch_size=4, validation_data=(x, x[:, :1]), validation_batch_size=8, verbose=0)
"""


@pytest.mark.parametrize("which", [pytest.param("keras", marks=pytest.mark.smoke), "tf_keras", "many"])
def test_fit_reports_progress_without_a_call_in_the_program(
    distlaunch: Distlaunch, warm: Distlaunch, tmp_path: Path, which: str
) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    run, env = (distlaunch, {"TF_USE_LEGACY_KERAS": "1"}) if which == "tf_keras" else (warm, {})
    ran = run("local", "-n", "1", "fit.py", which, env=env)
    assert ran.status == 0, ran.stderr
    told = ran.report["attempts"][0]["tasks"][0]["progress"]
    assert (told["step"], told["epoch"], told["first_epoch"]) == (60, 3, 1)
    assert {"loss", "val_loss"} <= told["metrics"].keys()
    *_, last = (entry["progress"] for entry in ran.events("task-reported") if entry["progress"])
    assert (last["total_steps"], last["total_epochs"], last["resumed"]) == (60, 3, 0)


def test_fit_reports_no_progress_if_progress_is_disabled(warm: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    ran = warm("local", "-n", "1", "--set", "progress=false", "fit.py", "keras")
    assert ran.status == 0, ran.stderr
    assert ran.report["attempts"][0]["tasks"][0]["progress"] is None


FIT_ON_SERVERS = """
import numpy as np
import tensorflow as tf
import tf_keras as keras

strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")

def read(context):
    x = np.ones((80, 4), "float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(4)

def read(context):
    x = np.ones((80, 4), "float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(4)

@tf.function
def slow(y):
    # Some milliseconds of a worker's time, for which the chief does not wait when it schedules the step.
    for _ in tf.range(20):
        y += 0.0 * tf.reduce_mean(tf.linalg.matmul(tf.random.normal((200, 200)), tf.random.normal((200, 200))))
    return y

class Watch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {epoch + 1}: {sorted(logs)}", flush=True)

data = keras.utils.experimental.DatasetCreator(read)
validation = {"validation_data": data, "validation_steps": 50}
model.fit(data, epochs=2, steps_per_epoch=200, **validation, callbacks=[Watch()], verbose=0)
"""


@needs_tf_keras
def test_fit_on_parameter_servers_counts_completed_steps(distlaunch: Distlaunch, tmp_path: Path) -> None:
    """tf_keras schedules the steps of an epoch one after the other, and hands remote values to the callbacks."""
    (tmp_path / "fit.py").write_text(FIT_ON_SERVERS)
    ran = distlaunch(
        *("local", "--strategy", "parameter_server", "-n", "2", "fit.py"), env={"TF_USE_LEGACY_KERAS": "1"}
    )
    assert ran.status == 0, ran.stderr
    log = ran.log("chief-0").decode()
    assert "Traceback" not in log
    assert "epoch 2: ['loss', 'val_loss']" in log
    told = {task["task"]: task["progress"] for task in ran.report["attempts"][0]["tasks"]}["chief:0"]
    assert (told["step"], told["epoch"]) == (400, 2)
    assert {"loss", "val_loss"} <= told["metrics"].keys()


SCHEDULED = """
import tensorflow as tf
import tf_keras
from tensorflow.python.distribute.coordinator.values import RemoteValueImpl
from worker_entry.task import keras_progress
from worker_entry.task.meter import Meter
from worker_entry.task.status_file import StatusFile

meter = Meter(StatusFile("status.json"), lambda: None)
keras_progress.install(meter)
callbacks = tf_keras.callbacks.CallbackList()
callbacks.on_train_begin()
callbacks.on_epoch_begin(0)
results = [RemoteValueImpl(None, None) for _ in range(4)]
for number, result in enumerate(results):
    callbacks.on_train_batch_end(number, result)
    meter.report()
counts = [meter.step]
results[1]._set_values({})
assert results[1].get() == {}
meter.report()
counts.append(meter.step)
results[0]._set_values({})
results[2]._set_error(ValueError("no batch"))
callbacks.on_epoch_end(0, {"loss": 0.5})
print(counts, meter.step)
"""


@needs_tf_keras
def test_a_scheduled_step_is_counted_only_after_a_worker_completes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCHEDULED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1] 2\n", done.stderr


FAIL_IN_FIT = """
import time, keras, numpy as np, tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
def fail(*_):
    time.sleep(2)
    raise ValueError("no batch")
model.fit(np.ones((8, 4)), np.ones((8, 1)), callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=fail)])
"""


def test_a_program_that_fails_before_its_first_step_is_not_restarted(warm: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text(FAIL_IN_FIT)
    ran = warm("local", "-n", "2", "--max-restarts", "3", "fit.py")
    assert (ran.status, len(ran.report["attempts"])) == (1, 1), ran.stderr
    assert "The cluster is up" in ran.stderr
    assert "not started again: the program failed before its first training step" in ran.stderr
