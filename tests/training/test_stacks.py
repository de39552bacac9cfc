"""Stacks of all tasks can be shown at any time, even while they are blocked in C++, without stopping anything."""

from __future__ import annotations

from pathlib import Path

from tests.harness.places import PROGRAMS
from tests.harness.processes.stacks import ask, running
from tests.harness.processes.warm_python import WarmPython
from tests.harness.witness import wait_until

COVERS = (
    "launcher/gang/watch/stacks.py",
    "launcher/commands",
    "worker_entry/agent/tasks/stacks.py",
    "launcher/controller/requests.py",
)


def test_stacks_distinguish_waiting_tasks_from_the_one_that_blocks_a_collective(
    warm_python: WarmPython, tmp_path: Path
) -> None:
    program = str(PROGRAMS / "fail_in_training.py")
    with running(tmp_path, "-n", "3", program, "worker:1", "sleep", command=warm_python.command):
        log = tmp_path / "run/attempt-1/worker-1.log"
        wait_until(lambda: log.exists() and b"about to fail" in log.read_bytes(), "it sleeps")
        wait_until(lambda: "worker:0, worker:2 are at" in ask(tmp_path), "the others wait for it")
        said = ask(tmp_path)
        assert f"worker:1 is at {program}:" in said
        assert " fail\n" in said
        assert "in quick_execute of execute.py" in said
