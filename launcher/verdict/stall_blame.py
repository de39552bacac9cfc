"""Finds the task that a stalled cluster waits for, and renders the sentences about the stall."""

from __future__ import annotations

from launcher.gang.state import AttemptState
from launcher.gang.watch.stacks import group_stacks
from launcher.gang.watch.stalls import reports_steps, usual_step_s
from launcher.tasks import TaskId, name_tasks


def render_stall(state: AttemptState) -> str:
    """`no step for 15 s (a step usually takes 0.2 s)`."""
    if not reports_steps(state):
        return f"no sign of progress for {state.stalled_s:.0f} s"
    step_s = usual_step_s(state)
    usual = f" (a step usually takes {step_s:.2g} s)" if step_s is not None else ""
    return f"no step for {state.stalled_s:.0f} s{usual}"


def find_staller(state: AttemptState) -> TaskId | None:
    """The one task that the others wait for, if the stacks and steps show it."""
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
    """`steps done: 49 by worker:1, 50 by the others`; empty if all tasks have done the same number."""
    done: dict[int, list[TaskId]] = {}
    for task in sorted(state.policy.trainers & state.status.keys()):
        progress = state.status[task].progress
        if progress is not None and progress.first_step is not None:
            done.setdefault(progress.step, []).append(task)
    if len(done) < 2:
        return ""
    (most, _), *others = sorted(done.items(), key=lambda item: -len(item[1]))
    rare = ", ".join(f"{step:,} by {name_tasks(tasks)}" for step, tasks in others)
    return f"steps done: {rare}, {most:,} by the others"
