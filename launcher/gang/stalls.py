"""Whether a cluster that is up has stopped getting on. Pure.

What counts: a batch, if the program tells of them, whoever did it; else a line of output. A cluster whose steps are
told is watched by itself, since it is known how long they take.
"""

from __future__ import annotations

from launcher.gang.events import Event, TaskListening, TaskReported, TaskStarted, TaskWrote
from launcher.gang.state import AttemptState, Phase

STEPS = 20
"""So many times as long as a step takes is too long for one, …"""
LEAST_S = 120.0
"""… but never less: between steps there may be a checkpoint, or a validation of the program's own."""


def is_progress(state: AttemptState, event: Event) -> bool:
    """Whether the event shows that the cluster gets on."""
    if isinstance(event, TaskWrote):
        return not reports_steps(state)
    return isinstance(event, (TaskStarted, TaskListening, TaskReported))


def is_stalled(state: AttemptState, now: float) -> bool:
    """Whether it has got nowhere for too long; `now`: the controller's monotonic clock, in seconds."""
    if state.last_progress is None or now - state.last_progress < (state.policy.stall_s or LEAST_S):
        return False
    if state.excused is not None and now < state.excused:
        return False
    limit_s = stall_limit_s(state)
    return limit_s is not None and now - state.last_progress >= limit_s


def stall_limit_s(state: AttemptState) -> float | None:
    """How long it may go without progress just now; None for ever."""
    if state.phase is not Phase.RUNNING or state.policy.stall_s == 0 or state.policy.trainers & state.exits.keys():
        return None  # who has ended is waited for by the rules of the end
    if state.policy.stall_s is not None:
        return state.policy.stall_s
    step_s = usual_step_s(state)
    return max(STEPS * step_s, LEAST_S) if step_s is not None and reports_steps(state) else None


def usual_step_s(state: AttemptState) -> float | None:
    """Seconds from one step to the next, on the average of this attempt; None until there were two."""
    times = [
        (progress.time - progress.began) / (progress.step - progress.first_step)
        for progress in (told.stepping for told in state.status.values())
        if progress is not None and progress.step > progress.first_step
    ]
    return max(times, default=None)


def reports_steps(state: AttemptState) -> bool:
    """Whether all that train are in the middle of it, and tell of each step."""
    return all(task in state.status and state.status[task].stepping for task in state.policy.trainers)
