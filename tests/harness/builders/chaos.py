"""Attempts with injected faults."""

from __future__ import annotations

from launcher.gang.events import Event, TaskReported
from launcher.gang.faults import Fault
from launcher.gang.state import AttemptState
from tests.harness.builders.gang import W0, W1, make_policy, play, running
from worker_entry.protocol.values import Injection, Progress

KILL = Fault(W1, Injection("kill", "epoch", 3.0))


def attempt(*epochs: int, injected: bool = False, step: int = 21) -> AttemptState:
    """An attempt in which the workers reported these epochs: the first and the last."""
    policy = make_policy({"a": [W0, W1]})
    events: list[Event] = []
    for task in (W0, W1) if epochs else ():
        progress = Progress(step, 1, step, 1000.0, 1010.0, True, epochs[-1], epochs[0])
        events.append(TaskReported(task, "is training", 990.0, progress, (str(KILL.injection),) if injected else ()))
    return play(policy, *running(policy), *events)[0]
