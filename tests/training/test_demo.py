"""The built-in demo: its data matches DATA.md, and two workers train on it, agree and save once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.demo import DEMO

COVERS = ("worker_entry/demo", "worker_entry/strategies.py", "worker_entry/progress.py", "cluster_specs")

TOLERANCE = 0.003
"""Allows for floats summed in another order over 22 steps, and for one of the 360 validation images."""
LAST_LINE = r"worker:(\d+) of (\d+): validation accuracy (\d\.\d{3}), [\d,]+ images/s"
SCORE_AGAIN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import keras, train
images, labels = train.load_data()[1]
model = keras.models.load_model(sys.argv[2])
print(json.dumps(model.evaluate(images, labels, verbose=0, return_dict=True)))
"""


@pytest.mark.smoke
def test_the_demo_on_two_workers_agrees_and_saves_one_model(distlaunch: Distlaunch, tmp_path: Path) -> None:
    """Slow: the demo trains to a good accuracy, and another process loads its model."""
    # The workers' temporary directory, checked below for leftovers.
    scratch = tmp_path / "tmp"
    scratch.mkdir()

    ran = distlaunch("local", "--workers", "2", env={"TMPDIR": str(scratch)}, timeout=240)

    assert ran.status == 0, ran.stderr
    assert "distlaunch: patched" not in ran.stdout + ran.stderr  # printed once; the logs have names
    patched = r"Keras \S+: \d+ faults patched for multi-worker training \(--set keras.patch=false turns this off\)\n"
    assert len(re.findall(patched, ran.stderr)) == ("patched" in ran.log().decode())
    accuracies = set()
    for index in range(2):
        log = ran.log(f"worker-{index}").decode()
        assert re.search(r"^distlaunch: (patched Keras|Keras .* needs no patch)", log, re.MULTILINE), log
        last = ran.line(LAST_LINE, f"worker-{index}")
        assert last.group(1, 2) == (str(index), "2")
        accuracies.add(last[3])
    assert len(accuracies) == 1, "the workers disagree"
    accuracy = float(accuracies.pop())
    assert accuracy >= 0.95

    assert sorted(path.name for path in (ran.directory / "model").iterdir()) == ["digits.keras"]
    assert not list(scratch.glob("tmp*")), "a worker left its temporary model behind"
    assert score_again(ran.directory / "model" / "digits.keras") == pytest.approx(
        accuracy, abs=0.0006
    )  # the demo prints three digits


def score_again(model: Path) -> float:
    """The accuracy of a saved model on the validation images, in a process without TF_CONFIG."""
    alone = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    scored = subprocess.run(
        [sys.executable, "-c", SCORE_AGAIN, str(DEMO), str(model)],
        env=alone,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert scored.returncode == 0, scored.stderr
    return float(json.loads(scored.stdout.splitlines()[-1])["accuracy"])


@pytest.mark.parametrize("how", ["data", "file"])
def test_no_image_of_the_demo_is_used_twice_in_an_epoch(warm: Distlaunch, how: str) -> None:
    ran = warm("local", "--workers", "2", str(PROGRAMS / "shard_ids.py"), how)
    assert ran.status == 0, ran.stderr
    seen = [json.loads(ran.line(r"\[\d.*\]", f"worker-{worker}")[0]) for worker in range(2)]
    assert [len(of_worker) for of_worker in seen] == [22 * 32] * 2
    assert len({*seen[0], *seen[1]}) == 2 * 22 * 32


def test_demo_training_on_four_devices_matches_one_device(warm: Distlaunch, tmp_path: Path) -> None:
    """Slow: it trains three times, to compare the other strategies with one device."""
    losses: dict[str, list[float]] = {}
    scores: dict[str, float] = {}
    for strategy in ("one_device", "mirrored", "central_storage"):
        ran = warm(
            *("local", "--strategy", strategy, "--devices", "4", "--run-dir", str(tmp_path / strategy)),
            *("-m", "worker_entry.demo.train", "--epochs", "2", "--global-batch", "128"),
            run_dir=False,
        )
        assert ran.status == 0, ran.stderr
        log = (tmp_path / strategy / "attempt-1" / "worker-0.log").read_text()
        replicas = 1 if strategy == "one_device" else 4
        assert f"{replicas} replicas in sync, 128 images per step\n" in log
        losses[strategy] = [float(loss) for loss in re.findall(r" loss: (\d+\.\d+)", log)]
        [scores[strategy]] = [float(score) for score in re.findall(r": validation accuracy (\d\.\d+)", log)]
    for strategy in ("mirrored", "central_storage"):
        assert losses[strategy] == pytest.approx(losses["one_device"], abs=TOLERANCE)
        assert scores[strategy] == pytest.approx(scores["one_device"], abs=TOLERANCE)
