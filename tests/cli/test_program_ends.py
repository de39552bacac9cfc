"""A program counts as ended even if its process still waits for peers, children or a handler."""

from __future__ import annotations

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/gang", "worker_entry/task/runner.py", "worker_entry/agent/tasks/watches.py")

STAYS = str(PROGRAMS / "ends_but_stays.py")


def test_a_failed_program_ends_the_run_even_if_its_process_stays(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "-n", "2", "--set", "timeouts.stop_grace_s=2", "--no-live", STAYS, "raises", "worker:1")
    assert (ran.status, ran.report["verdict"]["reference"], ran.report["verdict"]["task"]) == (
        1,
        "task-failed",
        "worker:1",
    )
    assert "ValueError: row 3 has 7" in ran.report["verdict"]["evidence"][0]
    assert "worker:1 has failed with" in ran.stderr
    assert "0 processes left" in ran.stderr


def test_a_finished_program_ends_the_run_successfully_even_if_its_process_stays(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "-n", "2", "--set", "timeouts.drain_s=3", "--no-live", STAYS, "returns", "worker:1")
    assert ran.status == 0, ran.stderr
    assert ran.report["verdict"]["reference"] == "succeeded"
    assert "worker:1 finished its program before its interpreter ended with" in ran.report["verdict"]["evidence"][0]
