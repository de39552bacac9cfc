"""Whether a running cluster has stopped making progress.

If the program reports steps, a step of any trainer counts as progress; otherwise a line of output does. A cluster that
reports steps is watched by default, because the usual time of a step is known.
"""

from __future__ import annotations

from launcher.gang.events import Event, TaskListening, TaskReported, TaskStarted, TaskWrote
from launcher.gang.state import AttemptState, Phase

STEPS = 20
"""A step that takes this many times its usual time takes too long, …"""
LEAST_S = 120.0
"""… but it always has this long: between steps, the program may save a checkpoint or validate."""


def is_progress(state: AttemptState, event: Event) -> bool:
    """Whether the event shows that the training makes progress."""
    if not isinstance(event, (TaskWrote, TaskStarted, TaskListening, TaskReported)):
        return False
    return event.task in state.policy.trainers and not (isinstance(event, TaskWrote) and reports_steps(state))


def is_stalled(state: AttemptState, now: float) -> bool:
    """Whether there was no progress for too long; `now`: the controller's monotonic clock, in seconds."""
    if state.last_progress is None or now - state.last_progress < (state.policy.stall_s or LEAST_S):
        return False
    if state.excused is not None and now < state.excused:
        return False
    limit_s = stall_limit_s(state)
    return limit_s is not None and now - state.last_progress >= limit_s


def stall_limit_s(state: AttemptState) -> float | None:
    """How long the cluster may now go without progress; None: no limit."""
    if state.phase is not Phase.RUNNING or state.policy.stall_s == 0 or state.ended:
        return None  # the drain time-out applies once a task has ended
    if state.policy.stall_s is not None:
        return state.policy.stall_s
    step_s = usual_step_s(state)
    return max(STEPS * step_s, LEAST_S) if step_s is not None and reports_steps(state) else None


def usual_step_s(state: AttemptState) -> float | None:
    """Seconds per step of the slowest task, on average over this attempt; None until a task has done two steps."""
    times = [
        (progress.time - progress.began) / (progress.step - progress.first_step)
        for progress in (status.stepping for task, status in state.status.items() if task in state.policy.trainers)
        if progress is not None and progress.first_step is not None and progress.step > progress.first_step
    ]
    return max(times, default=None)


def reports_steps(state: AttemptState) -> bool:
    """Whether all training tasks are in the middle of training, and report their steps."""
    return all(task in state.status and state.status[task].stepping for task in state.policy.trainers)
