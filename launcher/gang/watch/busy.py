"""Which tasks are at work although no steps are reported: they are named, and not stopped.

A task waits if it uses no processor time, reads and writes nothing, and sleeps in a call of TensorFlow's, on a lock or
on a connection. Any other task is at work.
"""

from __future__ import annotations

from collections.abc import Mapping

from launcher.gang.state import AttemptState, Reason
from launcher.gang.watch.stacks import parse_stack, working_frame
from launcher.tasks import TaskId, name_tasks
from worker_entry.protocol.values import Activity

ACTIVE_S = 15.0
"""A task is at work if its node has measured work this recently."""
RECHECK_S = 60.0
"""How long a cluster with a task at work is not asked again."""


def find_busy(state: AttemptState) -> dict[TaskId, str]:
    """The training tasks that are at work, by their last answers, each with its place, as far as that is known."""
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
