"""Goodput that is counted by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from launcher.gang.events import TaskReported
from launcher.report.goodput import KINDS, Goodput
from launcher.report.run_events import (
    RunEvent,
)
from launcher.tasks import TaskId
from tests.harness.processes.commands import Ran
from worker_entry.protocol.values import Progress
from worker_entry.task.meter import REPORT_S

W0, W1, CHIEF = TaskId("worker", 0), TaskId("worker", 1), TaskId("chief", 0)
BEGAN = 1000.0
"""When the runs begin; the times of their events are relative to it."""


# --- histories ---


@dataclass(frozen=True)
class TimedEvent:
    at: float
    event: RunEvent
    attempt: int = 1


def steps(
    at: float, step: int, first: int = 1, began: float = 0.0, attempt: int = 1, task: TaskId = W0, **more: Any
) -> TimedEvent:
    """The task did step `first` at `began`, and has just done `step`."""
    progress = Progress(step, first, step, BEGAN + began, BEGAN + at, **more)
    return TimedEvent(at, TaskReported(task, "is training", BEGAN, progress), attempt)


MOMENTS = st.floats(-50, 250)
NUMBERS = st.integers(0, 200)


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    return Progress(
        draw(NUMBERS),
        draw(st.none() | NUMBERS),
        0,
        BEGAN + draw(MOMENTS),
        BEGAN + draw(MOMENTS),
        epoch=draw(st.none() | NUMBERS),
        first_epoch=draw(st.none() | NUMBERS),
        resumed=draw(st.none() | NUMBERS),
    )


# --- by hand ---


def count_by_hand(ran: Ran, failed_task: str, failed_step: int, saved_step: int) -> dict[str, float]:
    """The seconds of each kind in a run of two attempts, from its journal and its program's output.

    Args:
        ran: the run.
        failed_task: the file name of the task that fails in the first attempt.
        failed_step: the last step of that task.
        saved_step: the step from which the second attempt continues.
    """

    def printed(attempt: int, task: str) -> dict[str, float]:
        lines = (ran.directory / f"attempt-{attempt}" / f"{task}.log").read_text().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(("step ", "end ")))
        return {what: float(time) for what, time in pairs}

    formed = [entry["time"] for entry in ran.events("state") if entry["state"] == "forming"]
    report = ran.report
    first, second = printed(1, "worker-0"), printed(2, "worker-0")
    failed = printed(1, failed_task)[f"step {failed_step}"]
    begun, again = first["step 1"], second[f"step {saved_step + 1}"]
    end = max(printed(2, task["task"].replace(":", "-"))["end"] for task in report["attempts"][1]["tasks"])
    lost = failed - first[f"step {saved_step}"]
    return {
        "connecting_s": formed[0] - report["started"],
        "forming_s": begun - formed[0] + again - formed[1],
        "training_s": failed - begun - lost + end - again,
        "lost_s": lost,
        "restarting_s": formed[1] - failed,
        "stalled_s": 0.0,
        "waiting_s": 0.0,
        "ending_s": report["ended"] - end,
    }


def check_by_hand(ran: Ran, expected: dict[str, float], pause_s: float = 0.0) -> None:
    """Compares the goodput of the run's report with the count by hand.

    Goodput assumes that all steps between two reports take equally long, so it may misplace a pause of `pause_s`.
    """
    duration = ran.report["ended"] - ran.report["started"]
    counted = {kind: ran.report["goodput"][kind] for kind in KINDS}
    assert counted == pytest.approx(expected, abs=duration / 100 + min(pause_s, REPORT_S))
    assert sum(counted.values()) == pytest.approx(duration, abs=1e-6)
    assert ran.report["goodput"]["share"] == pytest.approx(counted["training_s"] / duration)


def seconds_of(goodput: Goodput) -> dict[str, Any]:
    """The seconds of each kind, without kinds of 0 s."""
    spent = {kind.removesuffix("_s"): getattr(goodput, kind) for kind in KINDS}
    return {kind: pytest.approx(value, abs=1e-6) for kind, value in spent.items() if abs(value) > 1e-6}
