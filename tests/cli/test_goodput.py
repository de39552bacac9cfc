"""Goodput: each second of a run is counted once, and as the right kind."""

from __future__ import annotations

import re

import pytest

from launcher.report.goodput import SHORT_S
from tests.harness.builders.goodput import (
    check_by_hand,
    count_by_hand,
)
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/report", "launcher/controller/goodput.py")


@pytest.mark.slow
def test_goodput_agrees_with_a_count_by_hand(distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "-n", "1", "--max-restarts", "1", str(PROGRAMS / "timed_steps.py"))
    assert ran.status == 0, ran.stderr
    check_by_hand(ran, count_by_hand(ran, "worker-0", 37, 30))
    assert {entry["progress"]["total_steps"] for entry in ran.events("task-reported") if entry["progress"]} >= {60}
    is_long = ran.report["ended"] - ran.report["started"] >= SHORT_S
    shown = re.search(r"^  Goodput \d+ %: \d\.\d s of \d+\.\d s trained; ", ran.stderr, re.MULTILINE)
    assert (shown is not None) == is_long
