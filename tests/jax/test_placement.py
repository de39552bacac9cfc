"""A bare `jax.distributed.initialize()` connects the processes as distlaunch has placed them, wherever it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.processes.commands import Distlaunch, Ran
from tests.harness.processes.jax import LOOK, PYTHON, read_look, write_spec

COVERS = (
    "launcher/plan",
    "worker_entry/children",
    "worker_entry/hooks/jax_cluster.py",
    "worker_entry/task/child_python.py",
)
LOOPBACK, EVERYWHERE = "0100007F", "0" * 32
OF_GRPC = "0000000000000000FFFF00000100007F"
"""The loopback address as gRPC binds it: as an address of IPv6."""


def look(ran: Ran, index: int) -> dict[str, Any]:
    assert ran.status == 0, ran.stderr
    return read_look(ran.log(f"worker-{index}").decode())


@pytest.mark.parametrize("guard", ["required", "off"])
def test_each_process_has_its_rank_and_only_the_cluster_reaches_its_ports(
    distlaunch: Distlaunch, tmp_path: Path, guard: str
) -> None:
    """The coordinator shares its port with the guard, which listens at all addresses; so it has to do the same."""
    ran = distlaunch("up", write_spec(tmp_path, LOOK, workers=3, rest=f"guard: {guard}\n"))
    for index in range(3):
        found = look(ran, index)
        assert (found["index"], sorted(found["ranks"]), found["local"], found["all"]) == (index, [0, 1, 2], 1, 3)
        of_coordinator = {EVERYWHERE if guard == "required" else OF_GRPC} if index == 0 else set()
        assert set(found["listening"]) == {LOOPBACK, *of_coordinator}


def test_the_variables_of_a_slurm_job_or_of_mpi_are_not_half_used(distlaunch: Distlaunch, tmp_path: Path) -> None:
    """With them, JAX would take the other process for its own, or give each process one device."""
    foreign = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "3",
        "OMPI_MCA_orte_hnp_uri": "1.tcp://10.0.0.9:1",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    }
    words = ", ".join(f"{name}: '{value}'" for name, value in foreign.items())
    ran = distlaunch("up", write_spec(tmp_path, LOOK, rest=f"env: {{{words}}}\n"))
    assert [(look(ran, index)["index"], look(ran, index)["all"]) for index in range(2)] == [(0, 2), (1, 2)]


def test_devices_split_the_cpu_of_each_process(distlaunch: Distlaunch, tmp_path: Path) -> None:
    ran = distlaunch("up", write_spec(tmp_path, LOOK, rest="devices: 3\n"))
    assert [(look(ran, index)["local"], look(ran, index)["all"]) for index in range(2)] == [(3, 6), (3, 6)]


@pytest.mark.parametrize("way", ["exec ", ""])
def test_a_python_that_a_command_starts_is_connected_too(distlaunch: Distlaunch, tmp_path: Path, way: str) -> None:
    """With `exec`, it is the task's own process, which reports that it has joined."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"framework: jax\nnodes: [{{host: local, tasks: {{worker: 2}}}}]\n"
        f"program: {{command: [sh, -c, 'true; {way}{PYTHON} {LOOK}']}}\n"
    )
    ran = distlaunch("up", str(spec))
    assert [look(ran, index)["index"] for index in range(2)] == [0, 1]


def test_a_program_whose_processes_train_apart_is_told_so(distlaunch: Distlaunch, tmp_path: Path) -> None:
    program = tmp_path / "apart.py"
    program.write_text(
        "import os; os.environ['KERAS_BACKEND'] = 'jax'\nimport keras, numpy as np\n"
        "model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])\nmodel.compile('sgd', 'mse')\n"
        "model.fit(np.ones((8, 4)), np.ones(8), epochs=1, verbose=0)\n"
    )
    ran = distlaunch("up", write_spec(tmp_path, str(program)))
    assert ran.status == 0, ran.stderr
    assert "jax.distributed.initialize()" in ran.stderr
