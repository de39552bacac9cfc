"""Training that is killed in its third epoch resumes from its last checkpoint on all workers, and ends correctly."""

from __future__ import annotations

import re

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("worker_entry/keras_patches", "worker_entry/strategies.py", "worker_entry/agent/tasks/watches.py")

KERAS = str(PROGRAMS / "resume_keras.py")
LOOP = str(PROGRAMS / "resume_loop.py")


@pytest.mark.parametrize("where", [pytest.param("shared", marks=pytest.mark.smoke), "own", "empty"])
def test_keras_training_resumes_from_the_backup_of_the_chief(warm: Distlaunch, where: str) -> None:
    ran = warm("local", "--workers", "2", "--max-restarts", "1", KERAS, "6", where, timeout=200)
    assert ran.status == 0, ran.stderr
    first, last = ran.report["attempts"]
    assert (first["verdict"]["task"], first["verdict"]["reference"]) == ("worker:1", "task-killed")
    assert last["verdict"]["reference"] == "succeeded"
    ends = set()
    for worker in ("worker-0", "worker-1"):
        before = (ran.directory / "attempt-1" / f"{worker}.log").read_text()
        after = (ran.directory / "attempt-2" / f"{worker}.log").read_text()
        assert re.findall(r"epoch (\d) begins", before) == ["1", "2", "3"]
        assert re.findall(r"epoch (\d) begins", after) == ["3", "4", "5", "6"]
        assert "iterations 24\n" in after  # 6 epochs of 4 steps: the optimizer resumed as well
        ends.add(re.findall(r"^(?:epochs|sum) .*", after, re.MULTILINE)[-1])
    assert len(ends) == 1  # both have the same weights, to the last bit
    assert not list((ran.directory / "checkpoints").glob("backup/*"))


def test_a_custom_training_loop_resumes_from_its_checkpoint(warm: Distlaunch) -> None:
    ran = warm("local", "--workers", "2", "--max-restarts", "1", LOOP, "6", "kill", timeout=200)
    assert ran.status == 0, ran.stderr
    assert ran.report["attempts"][0]["verdict"]["reference"] == "task-killed"
    for worker in ("worker-0", "worker-1"):
        log = (ran.directory / "attempt-2" / f"{worker}.log").read_text()
        assert "begins at epoch 3, step 20\n" in log
        assert "weight 120.0, steps 60\n" in log


def test_preemption_of_one_worker_makes_all_save_and_counts_no_restart(warm: Distlaunch) -> None:
    ran = warm("local", "--workers", "2", "--max-restarts", "1", LOOP, "6", "term", timeout=200)
    assert ran.status == 0, ran.stderr
    first, _ = ran.report["attempts"]
    assert first["verdict"]["reference"] == "preempted"
    assert [task["exit_code"] for task in first["tasks"]] == [42, 42]
    assert not any(task["stopped_by_us"] for task in first["tasks"])
    assert "(not counted)" in ran.stderr
    for worker in ("worker-0", "worker-1"):
        begun = re.search(
            r"begins at epoch 3, step (\d+)\n", (ran.directory / "attempt-2" / f"{worker}.log").read_text()
        )
        assert begun is not None
        assert 25 <= int(begun[1]) < 30
        assert "weight 120.0, steps 60\n" in (ran.directory / "attempt-2" / f"{worker}.log").read_text()
