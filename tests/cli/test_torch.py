"""PyTorch's DistributedDataParallel under distlaunch: gloo on the CPU, real processes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.plan.framework_env import make_framework_envs
from launcher.plan.making import make_plan
from launcher.plan.resources import NodeFacts
from launcher.spec.loading import parse_spec
from launcher.tasks import TaskId
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/plan", "worker_entry/program", "worker_entry/task")

TORCH_PYTHON = os.environ.get("DISTLAUNCH_TORCH_PYTHON", sys.executable)
"""A Python that has PyTorch; it need not be the one that has TensorFlow."""

HAS_TORCH = sys.executable != TORCH_PYTHON or importlib.util.find_spec("torch") is not None


def needs_torch(test: Callable[..., None]) -> Callable[..., None]:
    reason = "PyTorch is not installed"
    marked: Callable[..., None] = pytest.mark.slow(pytest.mark.skipif(not HAS_TORCH, reason=reason)(test))
    return marked


def write_spec(folder: Path, culprit: int, how: str, rest: str = "") -> str:
    path = folder / "spec.yaml"
    path.write_text(
        f"framework: torch\nnodes: [{{host: local, tasks: {{worker: 2}}, python: {TORCH_PYTHON}}}]\n"
        f"program: {{script: {PROGRAMS / 'ddp.py'}, args: [{culprit}, {how}]}}\n{rest}"
    )
    return str(path)


@needs_torch
def test_two_ddp_workers_end_with_equal_weights(distlaunch: Distlaunch, tmp_path: Path) -> None:
    ran = distlaunch("up", write_spec(tmp_path, -1, "none"))
    assert ran.status == 0, ran.stderr
    assert "The cluster is up after " in ran.stderr
    ends = [ran.log(f"worker-{index}").decode().splitlines()[-1] for index in range(2)]
    assert ends[0] == ends[1]
    assert ends[0].startswith("weights [1.0, ")


@needs_torch
@pytest.mark.parametrize(
    ("how", "reference"), [("raise", "task-failed"), ("kill", "task-killed"), ("exit", "task-failed")]
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_failed_ddp_worker_is_named_and_all_workers_are_restarted(
    distlaunch: Distlaunch, tmp_path: Path, culprit: int, how: str, reference: str
) -> None:
    ran = distlaunch("up", write_spec(tmp_path, culprit, how, "restart: {max_restarts: 1}\n"))
    assert ran.status == 0, ran.stderr
    verdict = ran.report["attempts"][0]["verdict"]
    assert (verdict["task"], verdict["reference"]) == (f"worker:{culprit}", reference)
    again = (ran.directory / "attempt-2" / "worker-1.log").read_text().splitlines()
    assert again[0] == "begins with step 41 as 1 of 2, 1 here"
    assert again[-1].startswith("weights [1.0, ")
    assert "0 processes left on this machine" in ran.stderr


@needs_torch
def test_local_runs_a_ddp_script_with_framework_torch(distlaunch: Distlaunch) -> None:
    program = str(PROGRAMS / "ddp.py")
    ran = distlaunch("local", "--framework", "torch", "-n", "2", "--python", TORCH_PYTHON, program, "-1", "none")
    assert ran.status == 0, ran.stderr
    assert ran.log("worker-1").startswith(b"begins with step 1 as 1 of 2, 1 here\n")


@pytest.mark.parametrize("required", [False, True])
def test_required_guard_stops_a_torch_run_with_an_unguardable_port(distlaunch: Distlaunch, required: bool) -> None:
    guard = ["--set", "guard=required"] if required else []
    ran = distlaunch("local", "--framework", "torch", "-n", "2", *guard, "--", "echo", "begun")
    assert ran.status == (3 if required else 0), ran.stderr
    assert ("PyTorch does not share it" in ran.stderr) == required  # no port was opened
    assert ("[port-unguarded]" in ran.stderr, "begun" in ran.stdout) == (required, not required)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["local"], "--framework torch has no demo"),
        (["local", "--strategy", "mirrored", "x.py"], "--framework torch has no strategies"),
        (["up", "-H", "a,b"], "--framework: PyTorch has no demo; name a `program:`"),
    ],
)
def test_framework_torch_rejects_strategies_and_the_demo(
    in_process: Distlaunch, words: list[str], message: str
) -> None:
    ran = in_process(words[0], "--framework", "torch", *words[1:])
    assert ran.status == 2
    assert ran.stderr.startswith(f"Error: {message} [usage]\n")


def test_torch_ranks_count_over_all_nodes_and_local_ranks_within_each() -> None:
    workers = [TaskId("worker", index) for index in range(3)]
    places = [("a", workers[0]), ("b", workers[1]), ("b", workers[2])]
    envs = make_framework_envs(
        "torch", places, dict(zip(workers, ["10.0.0.1:20000", "10.0.0.2:1", "10.0.0.2:2"], strict=True))
    )
    assert [envs[worker]["RANK"] for worker in workers] == ["0", "1", "2"]
    assert [envs[worker]["LOCAL_RANK"] for worker in workers] == ["0", "0", "1"]
    assert [envs[worker]["LOCAL_WORLD_SIZE"] for worker in workers] == ["1", "2", "2"]
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"]) for env in envs.values()} == {
        ("10.0.0.1", "20000", "3")
    }


def test_torch_workers_see_all_gpus_of_their_node_and_no_tf_config() -> None:
    spec = parse_spec(
        b"framework: torch\nnodes: [{host: a, tasks: {worker: 2}, gpus: [2, 3]}, {host: b}]\nprogram: {script: a.py}\n"
    )
    facts = {"a": NodeFacts(8, ("0", "1", "2", "3")), "b": NodeFacts(8)}
    plan = make_plan(spec, directory="/work", environ={}, python="python3", facts=facts)
    assert [task.env.get("CUDA_VISIBLE_DEVICES") for task in plan.tasks] == ["2,3", "2,3", None]
    assert [task.opens_port for task in plan.tasks] == [True, False, False]
    for task in plan.tasks:
        assert "TF_CONFIG" not in task.env
        assert (task.env["MASTER_ADDR"], task.patch_keras) == ("a", False)


def test_torch_workers_find_keras_variables_that_agree_with_torchruns() -> None:
    spec = parse_spec(b"framework: torch\nnodes: [{host: a, tasks: {worker: 2}}, {host: b}]\nprogram: {script: a.py}\n")
    plan = make_plan(spec, directory="/work", environ={}, python="python3")
    assert len(plan.tasks) == 3
    for task in plan.tasks:
        env = task.env
        assert env["KERAS_BACKEND"] == "torch"
        assert env["KERAS_DISTRIBUTION_JOB_ADDRESSES"] == f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        assert env["KERAS_DISTRIBUTION_NUM_PROCESSES"] == env["WORLD_SIZE"] == "3"
        assert env["KERAS_DISTRIBUTION_PROCESS_ID"] == env["RANK"]


def test_keras_on_torch_finds_an_ipv6_address_only_in_torchruns_variables() -> None:
    workers = [TaskId("worker", index) for index in range(2)]
    addresses = dict.fromkeys(workers, "[fd00::1]:20000")
    envs = make_framework_envs("torch", [("a", worker) for worker in workers], addresses)
    assert [*envs] == workers
    for env in envs.values():
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("fd00::1", "20000")
        assert "KERAS_DISTRIBUTION_JOB_ADDRESSES" not in env  # Keras would split it at each colon


def test_the_users_own_backend_of_keras_replaces_torch() -> None:
    spec = parse_spec(
        b"framework: torch\nnodes: [{host: a}]\nenv: {KERAS_BACKEND: tensorflow}\nprogram: {script: a.py}\n"
    )
    [task] = make_plan(spec, directory="/work", environ={}, python="python3").tasks
    assert task.env["KERAS_BACKEND"] == "tensorflow"
