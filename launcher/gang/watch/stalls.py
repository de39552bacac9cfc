"""Whether a running cluster has stopped making progress, and which tasks are at work nevertheless.

If the program reports steps, a step of any trainer counts as progress; otherwise a line of output does. A cluster that
reports steps is watched by default, because the usual time of a step is known.

All tasks are looked at when a step takes too long, and the cluster is stopped when all of them wait in two looks in a
row. At first, only certain waits count: those that only another task can end. A download, a sleep, or a child process
that waits may be healthy, so they count only when they have taken much longer. A task waits if it uses no processor
time, reads and writes nothing, and sleeps in a call of TensorFlow's, on a lock or on a connection. Any other task is at
work: it is named, and not stopped.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gang.events import Event, TaskListening, TaskReported, TaskStarted, TaskWrote
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.gang.watch.stacks import parse_stack, working_frame
from launcher.tasks import TaskId, name_tasks
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import Activity

STEPS = 20
"""A step that takes this many times as long as 99 of 100 steps do takes too long, …"""
LEAST_S = 10.0
"""… but never before this time."""
LONG_S = 120.0
"""How long all tasks may wait if something else than a task could wake one of them; also at least STEPS steps."""
AGAIN_S = 4.0
"""The time from a look in which all tasks wait to the next look."""
RECHECK_S = 30.0
"""The time from any other look to the next look."""
ACTIVE_S = 15.0
"""A task is at work if its node has measured work this recently."""


def is_progress(state: AttemptState, event: Event) -> bool:
    """Whether the event shows that the training makes progress."""
    if not isinstance(event, (TaskWrote, TaskStarted, TaskListening, TaskReported)):
        return False
    return event.task in state.policy.trainers and not (isinstance(event, TaskWrote) and reports_steps(state))


def note_progress(state: AttemptState, now: float) -> AttemptState:
    """The state after progress: whatever was seen in earlier looks no longer counts."""
    return replace(state, last_progress=now, next_look=0.0, busy={}, worked=None, waited=False)


def is_stalled(state: AttemptState, now: float) -> bool:
    """Whether there was no progress for too long, and the tasks have not just been looked at.

    `now`: the controller's monotonic clock, in seconds.
    """
    if state.last_progress is None or now - state.last_progress < (state.policy.stall_s or LEAST_S):
        return False
    limit_s = stall_limit_s(state)
    return limit_s is not None and now >= max(state.last_progress + limit_s, state.next_look) and not state.is_blind


def stall_limit_s(state: AttemptState, least_s: float = LEAST_S) -> float | None:
    """How long the cluster may now go without progress; None: no limit. `least_s`: without a limit of the user's."""
    if state.phase is not Phase.RUNNING or state.policy.stall_s == 0 or state.ended:
        return None  # the drain time-out applies once a task has ended
    if state.policy.stall_s is not None:
        return state.policy.stall_s
    step_s = max((progress.p99_s for progress in state.progresses if progress.p99_s is not None), default=None)
    return max(STEPS * step_s, least_s) if step_s is not None and reports_steps(state) else None


def note_look(state: AttemptState, now: float) -> AttemptState:
    """The state after a look at all tasks of a cluster without a limit of the user's."""
    assert state.last_progress is not None
    long_s = stall_limit_s(state, LONG_S) or LONG_S
    left_s = state.last_progress + long_s - now
    waits = is_deadlocked(state) or (left_s <= 0 and bool(state.halted))
    if not waits and left_s <= 0:
        if busy := find_busy(state):
            state = replace(state, busy=busy, worked=now)
        # Something may follow work that has just ended: TensorFlow may take a minute to drop the iterator of an epoch.
        waits = state.worked is None or now - state.worked >= long_s
    pause_s = AGAIN_S if waits else min(RECHECK_S, left_s) if left_s > 0 else RECHECK_S
    return replace(state, suspicion=None, deadline=None, waited=waits, next_look=now + pause_s)


def is_deadlocked(state: AttemptState) -> bool:
    """Whether each task is stopped by a signal, or waits for something that only another task can do."""
    tasks = (state.policy.trainers | state.policy.servers) & state.started.keys() - state.exits.keys()
    seen = [state.activity.get(task, Activity()) for task in tasks - state.halted.keys()]
    return all(activity.is_stuck and activity.idle_s is not None and activity.idle_s >= AGAIN_S for activity in seen)


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
    """Whether tasks at work keep a cluster that forms, or ends, from being stopped for this reason."""
    if reason is Reason.START_TIMEOUT:  # a task with an open port waits for the others, for ever
        running = state.policy.trainers - state.exits.keys()
        return bool(busy) and busy.keys() == running and not running & state.listening.keys()
    return bool(busy) and reason is Reason.DRAIN_TIMEOUT


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
