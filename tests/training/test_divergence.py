"""Workers whose models are no longer the same are named, with the first variable that differs."""

from __future__ import annotations

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("worker_entry/keras_patches", "worker_entry/agent/tasks/status_reader.py", "launcher/gang")


def test_workers_with_diverging_models_are_named(warm: Distlaunch) -> None:
    ran = warm("local", "--workers", "3", str(PROGRAMS / "drifting.py"), timeout=200)
    assert ran.status == 0, ran.stderr
    line = "of worker:0 at the end, first in sequential/counting/above; only the chief's is saved"
    assert ran.stderr.count(line) == 2, "once when it is found, and once at the end"
    assert line in ran.report["attempts"][0]["divergence"]


def test_workers_with_equal_models_are_not_mentioned(warm: Distlaunch) -> None:
    ran = warm("local", "--workers", "2", str(PROGRAMS / "resume_keras.py"), "3", "own", "0.01", timeout=200)
    assert ran.status == 0, ran.stderr
    assert "differ" not in ran.stderr
    assert ran.report["attempts"][0]["divergence"] == ""
