"""The demo of JAX on two processes, and a script that moves from TensorFlow to JAX with the same spec."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.harness.documents import JAX_PAGE, blocks
from tests.harness.places import ROOT
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.jax import PYTHON

COVERS = (
    "worker_entry/demo",
    "worker_entry/hooks",
    "worker_entry/task",
    "launcher/plan/framework_env.py",
    "cluster_specs",
)

LAST_LINE = r"worker:(\d+) of (\d+): validation accuracy (\d\.\d{3}), [\d,]+ images/s"
SCORE_AGAIN = """
import json, sys
from worker_entry.demo.digits import load_data
import keras
images, labels = load_data()[1]
print(keras.models.load_model(sys.argv[1]).evaluate(images, labels, verbose=0, return_dict=True)["accuracy"])
"""


def score_again(model: Path) -> float:
    """The accuracy of the saved model in a process of its own."""
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([PYTHON, "-c", SCORE_AGAIN, model], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@pytest.mark.smoke
def test_the_demo_of_jax_on_two_workers_agrees_and_saves_one_model(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--framework", "jax", "--workers", "2", "--python", PYTHON, timeout=240)
    assert ran.status == 0, ran.stderr
    assert ran.stdout.count("2 devices in 2 processes, 64 images per step") == 1
    lasts = [ran.line(LAST_LINE, f"worker-{index}") for index in range(2)]
    assert [last.groups()[:2] for last in lasts] == [("0", "2"), ("1", "2")]
    [accuracy] = {last[3] for last in lasts}
    assert float(accuracy) > 0.95
    assert f"{score_again(ran.directory / 'model' / 'digits.keras'):.3f}" == accuracy
    assert ran.report["attempts"][0]["tasks"][1]["progress"]["step"] == 12 * 22


def test_the_demo_of_jax_continues_from_the_checkpoint_of_its_first_worker(
    distlaunch: Distlaunch, tmp_path: Path
) -> None:
    words = ["--framework", "jax", "--python", PYTHON, "-m", "worker_entry.demo.train_jax"]
    checkpoints = ["--checkpoints", str(tmp_path / "checkpoints")]
    for epochs, first in ((2, 1), (3, 3)):
        directory = ["--run-dir", str(tmp_path / f"run-{epochs}")]
        ran = distlaunch("local", *directory, *words, "--epochs", str(epochs), *checkpoints, run_dir=False, timeout=240)
        assert ran.status == 0, ran.stderr
        shown = re.findall(r"Epoch (\d)/\d", ran.stdout)
        assert shown == [str(epoch) for epoch in range(first, epochs + 1)]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["epoch-0001.keras", "epoch-0002.keras", "epoch-0003.keras"]


def test_the_demo_of_jax_trains_on_several_devices_of_each_process(distlaunch: Distlaunch) -> None:
    program = ["-m", "worker_entry.demo.train_jax", "--epochs", "1", "--global-batch", "60"]
    words = ["--framework", "jax", "-n", "3", "--devices", "2", "--python", PYTHON]
    ran = distlaunch("local", *words, *program, timeout=240)
    assert ran.status == 0, ran.stderr
    assert "6 devices in 3 processes, 60 images per step" in ran.stdout


def test_the_demo_of_jax_trains_alone_without_the_launcher(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    words = [PYTHON, "-m", "worker_entry.demo.train_jax", "--epochs", "1", "--model-dir", str(tmp_path)]
    done = subprocess.run(words, env={**env, "JAX_PLATFORMS": "cpu"}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"worker:0 of 1: validation accuracy 0\.\d{3}", done.stdout.splitlines()[-1])
    assert (tmp_path / "digits.keras").exists()


@pytest.mark.parametrize(("framework", "place"), [("tensorflow", 0), ("jax", 1)])
def test_the_scripts_of_the_page_on_jax_train_with_one_spec(
    distlaunch: Distlaunch, tmp_path: Path, framework: str, place: int
) -> None:
    scripts = blocks(JAX_PAGE, "python")
    assert len(scripts) == 2
    (tmp_path / "train.py").write_text(scripts[place])
    spec = tmp_path / "one_spec.yaml"
    spec.write_text(
        f"nodes: [{{host: local, tasks: {{worker: 2}}, python: {PYTHON}}}]\n"
        f"program: {{script: train.py}}\nworking_directory: {tmp_path}\n"
    )
    ran = distlaunch("up", "--framework", framework, str(spec), timeout=240)
    assert ran.status == 0, ran.stderr
    ends = [re.findall(r"loss: ([\d.]+)", ran.log(f"worker-{index}").decode()) for index in range(2)]
    assert len(ends[0]) == 3
    assert ends[0] == ends[1]
    assert (ran.directory / "checkpoints" / "model.keras").exists()
