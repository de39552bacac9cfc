"""Attempts that stop making progress."""

from __future__ import annotations

from dataclasses import replace

from launcher.gang.events import Event, TaskReported
from launcher.gang.state import AttemptState
from launcher.tasks import TaskId
from tests.harness.builders.gang import (
    W0,
    W1,
    W2,
    make_policy,
    play,
    running,
)
from worker_entry.protocol.values import Progress

THREE = {"a": [W0, W1, W2]}


def told(
    task: TaskId,
    step: int,
    *,
    step_s: float = 0.5,
    p99_s: float | None = None,
    training: bool = True,
    phase: str = "is training",
) -> TaskReported:
    """A task's report after this step of a training that began at 1000; by default, all steps take `step_s`."""
    time = 1000.0 + (step - 1) * step_s
    first, began, last = (1, 1000.0, time) if step else (None, 0.0, 0.0)
    progress = Progress(step, first, step, began, last, training, p99_s=(p99_s or step_s) if step > 1 else None)
    return TaskReported(task, phase, 990.0, progress)


def stalled(*events: Event | float, stall_s: float | None = None) -> AttemptState:
    policy = replace(make_policy(THREE), stall_s=stall_s)
    return play(policy, *running(policy), *events)[0]
