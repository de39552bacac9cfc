"""When a run with `-d` returns before its cluster is up: it may wait for GPUs, or its program may never form one."""

from __future__ import annotations

from launcher.gang.state import AttemptState, Phase
from launcher.gang.waiting import render_waiting
from launcher.spec.strategies import TORCH
from worker_entry.protocol.values import NOT_IMPORTED

WITHOUT_FRAMEWORK_S = 2.0
"""How long all tasks have lived without importing a framework."""
FORMING_S = 10.0
"""How long a cluster may form; the nodes have passed their checks before."""


def find_departure(state: AttemptState, now: float) -> str | None:
    """Why a run in the background leaves its terminal although its cluster is not up; None: not yet.

    Args:
        state: the attempt.
        now: Unix seconds by the controller's clock.
    """
    if state.lacks_gpus:
        return "The run waits in the background, and starts once the GPUs are free"
    if state.phase is not Phase.FORMING or not state.started:
        return None
    alone_s = now - max(event.time for event in state.started.values())
    is_whole = state.policy.tasks <= state.started.keys()
    if is_whole and alone_s >= WITHOUT_FRAMEWORK_S and not _has_framework(state):
        return "The tasks run, but have not imported TensorFlow; the run continues in the background"
    forming_s = now - min(event.time for event in state.started.values())
    if forming_s >= FORMING_S:
        return f"Not up after {forming_s:.0f} s, {render_waiting(state, now)}; the run continues in the background"
    return None


def _has_framework(state: AttemptState) -> bool:
    """Whether a task has begun to import a framework, as far as that is known."""
    if state.listening or state.policy.strategy is TORCH:  # tasks do not report an import of PyTorch
        return True
    return any(status.phase != NOT_IMPORTED or status.strategy for status in state.status.values())
