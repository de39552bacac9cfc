"""Keras on JAX: several processes train with the numbers of one, whatever the data are."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.polling import HANG_S
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.jax import PYTHON, write_spec

COVERS = ("worker_entry/hooks/jax_cluster.py", "worker_entry/keras_patches/on_jax", "launcher/plan/framework_env.py")
PROGRAM = str(PROGRAMS / "jax_numbers.py")


def read_numbers(output: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("numbers "):
            found.update(json.loads(line.removeprefix("numbers ")))
    return found


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, Any]:
    ran = subprocess.run([PYTHON, PROGRAM], capture_output=True, text=True, timeout=HANG_S, check=True)
    return read_numbers(ran.stdout)


@pytest.mark.parametrize("workers", [2, 3])
def test_several_processes_have_the_losses_metrics_and_predictions_of_one(
    distlaunch: Distlaunch, tmp_path: Path, of_one_process: dict[str, Any], workers: int
) -> None:
    ran = distlaunch("up", write_spec(tmp_path, PROGRAM, workers=workers))
    assert ran.status == 0, ran.stderr
    assert re.search(rf"^The cluster is up after \S+ s: {workers} tasks$", ran.stderr, re.MULTILINE)
    assert set(of_one_process) == {"arrays", "pydataset", "generator", "tf.data"}
    for index in range(workers):
        found = read_numbers(ran.log(f"worker-{index}").decode())
        assert found.keys() == of_one_process.keys()
        for kind, numbers in of_one_process.items():
            for name, values in numbers.items():
                assert found[kind][name] == pytest.approx(values, rel=1e-5, abs=1e-5), (kind, name)


def test_unpatched_keras_refuses_arrays(distlaunch: Distlaunch, tmp_path: Path) -> None:
    """If this fails, Keras shares out arrays by itself, and the patch is not needed any more."""
    ran = distlaunch("up", write_spec(tmp_path, PROGRAM, rest="keras: {patch: false}\n"))
    assert ran.status == 1
    assert "must be provided as a `tf.data.Dataset` instance" in ran.stderr
