"""The worker that keeps the others waiting is named, with the reason; one bad second is not enough."""

from __future__ import annotations

import re

from tests.harness.places import PROGRAMS
from tests.harness.processes.commands import Distlaunch

COVERS = ("launcher/gang", "worker_entry/hooks", "worker_entry/task/meter.py")

TRAIN = str(PROGRAMS / "train_keras.py")


def test_a_worker_with_slow_input_is_named_as_straggler_with_the_reason(warm: Distlaunch) -> None:
    ran = warm("local", "-n", "3", TRAIN, "worker:1", "slow", "10")
    assert ran.status == 0, ran.stderr
    [named] = [line for line in ran.stderr.splitlines() if "× the median step" in line]
    times = re.match(r"worker:1 takes ([0-9.]+) × the median step: ", named)
    assert times is not None, named
    assert float(times[1]) > 1  # of medians, which one busy moment does not change
    assert "reason: input pipeline (it waits " in named
    told = {task["task"]: task["progress"] for task in ran.report["attempts"][0]["tasks"]}
    assert {each["step"] for each in told.values()} == {200}
    steps = [each["step_s"] for each in told.values()]  # of a second of steps, for each worker at another moment
    assert max(steps) < 4 * min(steps)
    # These are values of one moment, in which another test may have used the cores.
    assert told["worker:1"]["data_s"] > 0.5 * told["worker:1"]["own_s"] > told["worker:0"]["data_s"]


def test_equally_fast_workers_are_not_named_as_stragglers(warm: Distlaunch) -> None:
    ran = warm("local", "-n", "2", TRAIN, "nobody", "x", "40")
    assert ran.status == 0, ran.stderr
    assert "× the median step" not in ran.stderr
    assert b'"straggler"' not in (ran.directory / "events.jsonl").read_bytes()
