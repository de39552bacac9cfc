"""Goodput: each second of a run is counted once, and as the right kind."""

from __future__ import annotations

import itertools
import statistics

from tests.harness.builders.goodput import (
    check_by_hand,
    count_by_hand,
)
from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch, Ran

COVERS = ("launcher/report", "launcher/controller/goodput.py")


def find_pause(ran: Ran, saved_step: int) -> float:
    """How much longer the step after `saved_step` was than the median step, because the program saves in it."""
    lines = (ran.directory / "attempt-1" / "worker-0.log").read_text().splitlines()
    times = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    steps = [after - before for before, after in itertools.pairwise(times)]
    return steps[saved_step - 1] - statistics.median(steps)


def test_goodput_agrees_with_a_count_by_hand_when_a_worker_is_killed(warm: Distlaunch) -> None:
    """The backup is written after each epoch of 20 steps."""
    program = (str(PROGRAMS / "timed_keras.py"), "4")
    ran = warm("local", "--workers", "2", "--chaos", "kill:worker:1@step=55", *program)
    assert ran.status == 0, ran.stderr
    check_by_hand(ran, count_by_hand(ran, "worker-1", 55, 40), find_pause(ran, 40))
    progresses = [(entry["attempt"], entry["progress"]) for entry in ran.events("task-reported") if entry["progress"]]
    assert {(attempt, told["resumed"]) for attempt, told in progresses if told["first_step"]} == {(1, 0), (2, 40)}
