"""Keras' nightly build trains on PyTorch under `framework: torch`; no release of Keras has DataParallel on PyTorch yet.

gloo on the CPU, real processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.available import find_python
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, Ran, make_distlaunch
from tests.harness.processes.environments import Environment, NotInstallableError
from tests.harness.rules.version_rows import ROW

PYTHON = "3.11"
REQUIREMENTS = ["keras-nightly", "torch==2.13.*"]
INSTALL_S = 3600
RUN_S = 300.0
VERSIONS = """
import json, os, platform
os.environ["KERAS_BACKEND"] = "torch"
import keras, torch
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "keras": keras.__version__}))
"""


@pytest.fixture(scope="module")
def environment() -> Environment:
    interpreter = find_python(PYTHON)
    if interpreter is None:
        pytest.skip(f"no python{PYTHON} on PATH or from pyenv")
    made = Environment(f"keras-on-torch-{PYTHON}", interpreter)
    try:
        made.install(REQUIREMENTS)
    except NotInstallableError as error:
        pytest.skip(f"pip cannot install {' '.join(REQUIREMENTS)}: {error}")
    return made


@pytest.fixture(scope="module")
def alone(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What one process ends with; all kinds of data have the same content."""
    folder = tmp_path_factory.mktemp("alone")
    ran = make_distlaunch(folder)("up", write_spec(folder, environment, 1, "arrays", "none"), timeout=RUN_S)
    [end] = ends(ran, 1)
    assert len(end) == 9  # the weights, and two metrics of four epochs
    return end


def write_spec(folder: Path, environment: Environment, processes: int, data: str, how: str, rest: str = "") -> str:
    path = folder / "spec.yaml"
    path.write_text(
        f"framework: torch\nnodes: [{{host: local, tasks: {{worker: {processes}}}, python: {environment.python}}}]\n"
        f"program: {{script: {PROGRAMS / 'keras_on_torch.py'}, args: [{data}, {how}]}}\n{rest}"
    )
    return str(path)


def ends(ran: Ran, processes: int, attempt: int = 1) -> list[list[float]]:
    """The sum of the weights, and the history, of each process."""
    assert ran.status == 0, ran.stderr
    logs = [(ran.directory / f"attempt-{attempt}" / f"worker-{index}.log").read_text() for index in range(processes)]
    lines = [[line for line in log.splitlines() if line.startswith("ends with ")] for log in logs]
    assert [*map(len, lines)] == [1] * processes, logs
    return [[*map(float, line.split()[2:])] for [line] in lines]


@pytest.mark.timeout(INSTALL_S)
@pytest.mark.parametrize("data", ["arrays", "dataset", "loader"])
def test_two_processes_of_keras_on_torch_train_as_one_process_does(
    distlaunch: Distlaunch,
    tmp_path: Path,
    environment: Environment,
    alone: list[float],
    data: str,
    record_property: Callable[[str, object], None],
) -> None:
    ran = distlaunch("up", write_spec(tmp_path, environment, 2, data, "none"), timeout=RUN_S)
    first, second = ends(ran, 2)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-5)
    progress = [task["progress"] for task in ran.report["attempts"][0]["tasks"]]
    assert [(each["epoch"], each["step"]) for each in progress] == [(4, 32), (4, 32)]
    found = environment.inspect(VERSIONS)
    versions = f"Python {found['python']}, PyTorch {found['torch']}, Keras {found['keras']}"
    record_property(ROW, f"keras on torch, nightly: {versions}: two processes train with {data} as one does")


@pytest.mark.timeout(INSTALL_S)
@pytest.mark.parametrize(("how", "reference"), [("raise", "task-failed"), ("kill", "task-killed")])
def test_the_failed_process_of_keras_on_torch_is_named_and_all_continue_from_their_backups(
    distlaunch: Distlaunch, tmp_path: Path, environment: Environment, how: str, reference: str
) -> None:
    spec = write_spec(tmp_path, environment, 2, "arrays", how, "restart: {max_restarts: 1}\n")
    ran = distlaunch("up", spec, timeout=RUN_S)
    assert "0 processes left on this machine" in ran.stderr
    first, second = ends(ran, 2, attempt=2)
    assert first == second
    verdict = ran.report["attempts"][0]["verdict"]
    assert (verdict["task"], verdict["reference"]) == ("worker:1", reference)
    for index in range(2):
        again = (ran.directory / "attempt-2" / f"worker-{index}.log").read_text().splitlines()
        assert [line for line in again if line.startswith("begins")] == ["begins epoch 3", "begins epoch 4"]
