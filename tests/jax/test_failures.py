"""What a run of JAX says, and what it leaves behind, when one of its processes fails, stops or is too late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch
from tests.harness.processes.jax import write_spec

COVERS = (
    "launcher/gang",
    "launcher/verdict",
    "worker_entry/hooks/jax_cluster.py",
    "worker_entry/protocol/collateral.py",
    "worker_entry/task/runner.py",
)
PROGRAM = str(PROGRAMS / "jax_fit.py")


def spec_of(folder: Path, culprit: int, how: str, rest: str = "") -> str:
    (folder / "checkpoints").mkdir()
    directory = f"checkpoint_directory: {folder / 'checkpoints'}\n"
    return write_spec(folder, PROGRAM, str(culprit), how, rest=directory + rest)


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("how", "reference", "words"),
    [
        ("raise", "task-failed", "ValueError: batch 8 has no label"),
        ("exit", "task-failed", "exited with status 3"),
        ("kill", "task-killed", "was killed by SIGKILL"),
    ],
)
def test_the_process_that_failed_is_named_and_training_resumes_from_its_backup(
    distlaunch: Distlaunch, tmp_path: Path, culprit: int, how: str, reference: str, words: str
) -> None:
    """JAX's own time-outs for an end, a start and a heartbeat are minutes: none of them is waited for."""
    ran = distlaunch("up", spec_of(tmp_path, culprit, how, "restart: {max_restarts: 1}\n"))
    assert ran.status == 0, ran.stderr
    first, second = ran.report["attempts"]
    assert (first["verdict"]["task"], first["verdict"]["reference"]) == (f"worker:{culprit}", reference)
    assert words in ran.stderr
    assert "0 processes left on this machine" in ran.stderr
    # Five steps per epoch: the backup is of the first of four epochs.
    assert [(task["progress"]["first_epoch"], task["progress"]["step"]) for task in second["tasks"]] == [(2, 15)] * 2


@pytest.mark.parametrize(
    ("how", "words"),
    [("stop", "worker:1 was stopped by SIGSTOP"), ("hang", "worker:1 is at ")],
)
def test_a_process_that_makes_no_progress_is_named(
    distlaunch: Distlaunch, tmp_path: Path, how: str, words: str
) -> None:
    ran = distlaunch("up", spec_of(tmp_path, 1, how, "timeouts: {stall_s: 5}\n"))
    assert ran.status == 3
    verdict = ran.report["attempts"][0]["verdict"]
    assert (verdict["reference"], verdict["task"]) == ("stalled", "worker:1")
    assert words in verdict["message"]
    assert "0 processes left on this machine" in ran.stderr


def test_a_process_that_does_not_join_is_named(distlaunch: Distlaunch, tmp_path: Path) -> None:
    ran = distlaunch("up", spec_of(tmp_path, 1, "late", "timeouts: {start_s: 12}\n"))
    assert ran.status == 3
    verdict = ran.report["attempts"][0]["verdict"]
    assert (verdict["reference"], verdict["task"]) == ("start-timeout", "worker:1")
    assert "waiting for worker:1 on local (has imported JAX, " in verdict["message"]
    assert "jax.distributed.initialize()" in verdict["hint"]
    assert "0 processes left on this machine" in ran.stderr
