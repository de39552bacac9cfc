"""Whether a running cluster has stopped making progress, and which tasks are at work nevertheless.

If the program reports steps, a step of any trainer counts as progress; otherwise a line of output does. A cluster that
reports steps is watched by default, because the usual time of a step is known.

Tasks at work are named, and not stopped. A task waits if it uses no processor time, reads and writes nothing, and
sleeps in a call of TensorFlow's, on a lock or on a connection. Any other task is at work.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gang.events import Event, TaskListening, TaskReported, TaskStarted, TaskWrote
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.gang.watch.stacks import parse_stack, working_frame
from launcher.tasks import TaskId, name_tasks
from worker_entry.protocol.values import Activity

STEPS = 20
"""A step that takes this many times its usual time takes too long, …"""
LEAST_S = 120.0
"""… but never before this time: between steps, the program may save a checkpoint or validate."""
ACTIVE_S = 15.0
"""A task is at work if its node has measured work this recently."""
RECHECK_S = 60.0
"""How long to wait before a cluster with a task at work is asked again."""


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
    return limit_s is not None and now - state.last_progress >= limit_s and not state.is_blind


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


def find_busy(state: AttemptState) -> dict[TaskId, str]:
    """The training tasks that are at work according to their last answers, each with its place, if known."""
    busy = {}
    for task in sorted(state.policy.trainers & state.started.keys() - state.exits.keys() - state.halted.keys()):
        activity = state.activity.get(task, Activity())
        stack = parse_stack(state.stacks.get(task, ""))
        frame = working_frame(stack, waits=activity.waits)
        active = activity.idle_s is not None and activity.idle_s < ACTIVE_S
        if frame is not None or active:
            frame = frame or stack.own
            busy[task] = f"in {frame[2]} at {frame[0]}:{frame[1]}" if frame is not None else "at work"
    return busy


def is_excused(state: AttemptState, reason: Reason, busy: Mapping[TaskId, str]) -> bool:
    """Whether tasks at work keep the cluster from being stopped for this reason."""
    if not busy:
        return False
    if reason is Reason.STALLED:  # the user's limit is exact; others wait for a halted task
        return state.policy.stall_s is None and not state.halted
    if reason is Reason.START_TIMEOUT:  # a task with an open port waits for the others, for ever
        running = state.policy.trainers - state.exits.keys()
        return busy.keys() == running and not running & state.listening.keys()
    return reason is Reason.DRAIN_TIMEOUT


def render_busy(state: AttemptState) -> str:
    """`worker:0 has been in on_epoch_end at train.py:40 for 130 s; the others wait`."""
    places: dict[str, list[TaskId]] = {}
    for task, place in state.busy.items():
        places.setdefault(place, []).append(task)
    parts = [
        f"{name_tasks(tasks)} {'has' if len(tasks) == 1 else 'have'} been {place}" for place, tasks in places.items()
    ]
    others = state.policy.trainers - state.busy.keys() - state.exits.keys()
    rest = "" if not others else "; the others wait" if len(others) > 1 else f"; {next(iter(others))} waits"
    return f"{', '.join(parts)} for {state.stalled_s:.0f} s{rest}"
