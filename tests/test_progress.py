"""How far training has come is told without a word of the program's, and who keeps the others waiting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.events import TaskTold
from launcher.pace import SAMPLES, PaceWatch, render_slow
from launcher.tasks import TaskId
from tests.conftest import PROGRAMS, Distlaunch
from tests.test_gang import W0, W1, W2
from worker_entry.progress import Meter
from worker_entry.telling import Teller
from worker_entry.values import Progress


class TestPace:
    def test_a_task_is_slow_against_the_median_of_the_others(self) -> None:
        own = {W0: 0.2, W1: 0.2, W2: 0.36}
        assert render_slow(W2, own, 0.4) == (
            "worker:2 takes 1.8 × the median step: 360 ms of its own, the others 200 ms, and then they wait for it"
        )
        assert render_slow(W0, own, 0.4) is None

    @pytest.mark.parametrize(
        ("own", "step_s"),
        [
            ({W2: 0.3}, 0.3),  # nobody to compare it with
            ({W0: 0.2, W1: 0.2, W2: 0.29}, 0.3),  # not even half as much again
            ({W0: 0.001, W1: 0.001, W2: 0.01}, 0.3),  # no matter to a step of this length
        ],
    )
    def test_else_it_is_not(self, own: dict[TaskId, float], step_s: float) -> None:
        assert render_slow(W2, own, step_s) is None

    def test_it_is_said_after_some_measures_and_not_again_soon(self) -> None:
        watch = PaceWatch()
        lines = []
        for number in range(1, SAMPLES + 5):
            for task, own_s in ((W0, 0.1), (W1, 0.1), (W2, 0.3)):
                progress = Progress(number, 1, number, 1000.0, 1000.0 + number, step_s=0.4, own_s=own_s + number * 1e-6)
                event = TaskTold(task, "is training", 990.0, progress)
                lines += [(number, line) for line in (watch.note(event, 5.0 * number), watch.note(event, 5.0)) if line]
        assert [number for number, _ in lines] == [SAMPLES]
        assert lines[0][1].startswith("worker:2 takes 3.0 × the median step")


class TestMeter:
    def read(self, file: Path) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(file.read_text())
        return told

    def test_tells_what_it_has_counted(self, tmp_path: Path) -> None:
        file = tmp_path / "status.json"
        meter = Meter(Teller(str(file)), lambda: 0.0)
        assert self.read(file)["progress"] is None
        meter.begin()
        assert self.read(file)["progress"]["training"] is True
        meter.begin_epoch(3)
        meter.count_step(1, {"loss": 0.5, "text": "no number"})
        meter.count_step(2)
        meter.count_batch()
        meter.tell()
        told = self.read(file)["progress"]
        assert (told["step"], told["first_step"], told["batches"]) == (2, 1, 3)
        assert (told["epoch"], told["first_epoch"]) == (3, 3)
        assert told["metrics"] == {"loss": 0.5}
        meter.end_epoch({"loss": 0.25, "nan": float("nan")})
        meter.end()
        told = self.read(file)
        assert told["phase"] == "has trained"
        assert told["progress"]["training"] is False
        assert told["progress"]["metrics"] == {"loss": 0.25, "nan": None}

    def test_leaves_a_descriptor_alone_that_is_another_files_by_now(self, tmp_path: Path) -> None:
        source = """
import os, sys
from worker_entry.telling import Teller
teller = Teller("status.json")
teller.tell_phase("is at work")
os.closerange(3, 1000)
others = [os.open("other", os.O_RDWR | os.O_CREAT) for _ in range(300)]
teller.tell_phase("has closed everything")
"""
        subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
        assert (tmp_path / "other").read_bytes() == b""
        assert self.read(tmp_path / "status.json")["phase"] == "is at work"

    def test_a_forked_child_does_not_speak_for_its_parent(self, tmp_path: Path) -> None:
        source = """
import os
from worker_entry.telling import Teller
teller = Teller("status.json")
if os.fork() == 0:
    teller.tell_phase("is a child")
    os._exit(0)
os.wait()
"""
        subprocess.run([sys.executable, "-c", source], cwd=tmp_path, check=True)
        assert self.read(tmp_path / "status.json")["phase"] == "has not imported TensorFlow"


def test_without_a_launcher_to_report_is_nothing() -> None:
    source = "from worker_entry import progress; progress.report(step=1, loss=0.5)"
    subprocess.run([sys.executable, "-c", source], check=True)


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


@pytest.mark.tensorflow
@pytest.mark.parametrize("which", ["keras", "tf_keras", "many"])
def test_fit_is_counted_by_itself(distlaunch: Distlaunch, tmp_path: Path, which: str) -> None:
    (tmp_path / "fit.py").write_text(FIT)
    env = {"TF_USE_LEGACY_KERAS": "1"} if which == "tf_keras" else {}
    ran = distlaunch("local", "-n", "1", "fit.py", which, env=env)
    assert ran.status == 0, ran.stderr
    told = ran.report["attempts"][0]["tasks"][0]["progress"]
    assert (told["step"], told["epoch"], told["first_epoch"]) == (60, 3, 1)
    assert {"loss", "val_loss"} <= told["metrics"].keys()
    silent = distlaunch("local", "-n", "1", "--no-progress", "--run-dir", str(tmp_path / "2"), "fit.py", which, env=env)
    assert silent.status == 0
    report = json.loads((tmp_path / "2" / "report.json").read_text())
    assert report["attempts"][0]["tasks"][0]["progress"] is None


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


@pytest.mark.tensorflow
def test_a_program_that_fails_before_its_first_step_is_not_started_again_although_the_cluster_was_up(
    distlaunch: Distlaunch, tmp_path: Path
) -> None:
    (tmp_path / "fit.py").write_text(FAIL_IN_FIT)
    ran = distlaunch("local", "-n", "2", "--max-restarts", "3", "fit.py")
    assert (ran.status, len(ran.report["attempts"])) == (1, 1), ran.stderr
    assert "The cluster is up" in ran.stderr
    assert "not started again: the program failed before its first training step" in ran.stderr


@pytest.mark.tensorflow
def test_a_slow_worker_is_named_although_all_take_as_long_for_a_step(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "-n", "3", str(PROGRAMS / "train_keras.py"), "worker:1", "slow", "15")
    assert ran.status == 0, ran.stderr
    named = [line for line in ran.stderr.splitlines() if "× the median step" in line]
    assert len(named) == 1, ran.stderr
    assert named[0].startswith("worker:1 takes ")
    told = {task["task"]: task["progress"] for task in ran.report["attempts"][0]["tasks"]}
    assert {each["step"] for each in told.values()} == {300}
    steps = [each["step_s"] for each in told.values()]  # the last few, and each worker's at another moment
    assert max(steps) < 4 * min(steps)
    assert told["worker:1"]["own_s"] > 2 * told["worker:0"]["own_s"]
