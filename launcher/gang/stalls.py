"""Whether a cluster that is up has stopped getting on. Pure.

What counts: a batch, if the program tells of them, whoever did it; else a line of output. A cluster whose steps are
told is watched by itself, since it is known how long they take.
"""

from __future__ import annotations

from launcher.gang.events import Event, TaskListening, TaskReported, TaskStarted, TaskWrote
from launcher.gang.stacks import group_stacks
from launcher.gang.state import AttemptState, Phase
from launcher.tasks import TaskId, name_tasks

STEPS = 20
"""So many times as long as a step takes is too long for one, …"""
LEAST_S = 120.0
"""… but never less: between steps there may be a checkpoint, or a validation of the program's own."""


def is_progress(state: AttemptState, event: Event) -> bool:
    """Whether the event shows that the cluster gets on."""
    if isinstance(event, TaskWrote):
        return not _tells_steps(state)
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
    return max(STEPS * step_s, LEAST_S) if step_s is not None and _tells_steps(state) else None


def render_stall(state: AttemptState) -> str:
    """`no step for 120 s, where one takes 0.2 s`."""
    if not _tells_steps(state):
        return f"no sign of progress for {state.stalled_s:.0f} s"
    step_s = usual_step_s(state)
    usual = f", where one takes {step_s:.2g} s" if step_s is not None else ""
    return f"no step for {state.stalled_s:.0f} s{usual}"


def find_staller(state: AttemptState) -> TaskId | None:
    """The one task that the others wait for, if the stacks and steps tell."""
    trainers = state.policy.trainers & state.stopped
    halted = trainers & state.halted.keys()
    groups = [(trainers.intersection(tasks), stack) for tasks, stack in group_stacks(state.stacks)]
    busy = {task for tasks, stack in groups if stack.is_own for task in tasks}
    steps = {task: state.status[task].progress for task in trainers & state.status.keys()}
    done = {task: progress.step for task, progress in steps.items() if progress is not None}
    behind = {task for task, step in done.items() if step == min(done.values()) < max(done.values())}
    alone = {task for tasks, _ in groups[1:] for task in tasks} if not busy else set[TaskId]()
    candidates = (halted, busy, behind, alone)
    return next((next(iter(tasks)) for tasks in candidates if len(tasks) == 1 < len(trainers)), None)


def render_steps(state: AttemptState) -> str:
    """`steps done: 49 by worker:1, 50 by the others`; nothing if all have done as many."""
    done: dict[int, list[TaskId]] = {}
    for task in sorted(state.status):
        progress = state.status[task].progress
        if progress is not None and progress.first_step:
            done.setdefault(progress.step, []).append(task)
    if len(done) < 2:
        return ""
    (most, _), *others = sorted(done.items(), key=lambda item: -len(item[1]))
    rare = ", ".join(f"{step:,} by {name_tasks(tasks)}" for step, tasks in others)
    return f"steps done: {rare}, {most:,} by the others"


def usual_step_s(state: AttemptState) -> float | None:
    """Seconds from one step to the next, on the average of this attempt; None until there were two."""
    times = [
        (progress.time - progress.began) / (progress.step - progress.first_step)
        for progress in (told.stepping for told in state.status.values())
        if progress is not None and progress.step > progress.first_step
    ]
    return max(times, default=None)


def _tells_steps(state: AttemptState) -> bool:
    """Whether all that train are in the middle of it, and tell of each step."""
    return all(task in state.status and state.status[task].stepping for task in state.policy.trainers)
