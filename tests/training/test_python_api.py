"""The Python interface: runs from a program, a test or a notebook, which leave nothing behind and print nothing."""

from __future__ import annotations

import pytest
from distlaunch import run_local

COVERS = ("launcher/__init__.py", "launcher/public", "launcher/described.py", "launcher/result.py", "launcher/python")

pytestmark = pytest.mark.slow


@pytest.mark.smoke
def test_run_local_trains_the_demo_on_two_workers() -> None:
    report = run_local(module="worker_entry.demo.train", workers=2, settings=["program.args=[--epochs, 1]"])
    assert report.outcome == "succeeded", report.verdict
    steps = [task.progress.step for task in report.attempts[0].tasks if task.progress is not None]
    assert len(steps) == 2
    assert min(steps) > 10
