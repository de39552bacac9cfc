"""The verdict on a failed task: which task failed, how, with which exception, and what happened to the others."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from launcher.gang.events import TaskExited
from launcher.gang.faults import find_injected, render_injection
from launcher.gang.state import AttemptState
from launcher.gang.watch.stacks import PHRASES, find_outsider, render_split
from launcher.plan.launch_plan import TaskPlan
from launcher.tasks import TaskId, name_tasks
from launcher.verdict.causes import (
    Cause,
    ended_before,
    ended_time,
    failed_by_itself,
    failure_time,
    find_cause,
    find_own_end,
    is_collateral,
    was_stopped,
)
from launcher.verdict.exception_text import find_sentence
from launcher.verdict.models import Verdict
from launcher.verdict.stall_blame import render_steps
from launcher.wording import render_duration
from worker_entry.protocol.collateral import SIGNATURES
from worker_entry.protocol.values import CrashRecord, FirstError

SHOWN_LIMIT = 8
"""The maximum number of tasks that a verdict lists one by one."""

_HOW = {"out-of-memory": "ran out of memory: it ", "preempted": "was preempted: it "}


def judge_failure(
    state: AttemptState,
    plans: Mapping[TaskId, TaskPlan],
    logs: Mapping[TaskId, str],
    tails: Mapping[TaskId, Sequence[str]],
) -> Verdict:
    """The verdict on an attempt in which a training task failed; for the arguments, see `judge`."""
    cause = find_cause(state, tails)
    assert cause is not None
    exited = cause.exited
    if cause.reference == "out-of-step" and exited.crash is not None:
        return _judge_split(state, cause, exited.crash, logs)
    evidence = [] if exited.crash is None else render_crash(exited.crash)
    evidence += _followers(state, cause, tails)
    evidence.append(f"log: {logs[exited.task]}")
    ran = max(failure_time(exited) - state.started[exited.task].time, 0.0)
    if cause.absent is not None:
        port = f"port {state.ports[cause.absent]}" if cause.absent in state.ports else "port"
        return Verdict(
            reference=cause.reference,
            message=f"{cause.absent} on {plans[cause.absent].node} has not opened its {port}, and {exited.task}, which "
            f"needs it, {_render_end(cause)} after {render_duration(ran)}",
            task=str(cause.absent),
            evidence=evidence,
            hint=f"the program of {cause.absent} may still be starting, or it uses another address than its TF_CONFIG",
        )
    joint = {"ended-early": ", ", "stalled": " "}.get(cause.reference, ": ")
    return Verdict(
        reference=cause.reference,
        message=f"{exited.task} on {plans[exited.task].node} {_render_end(cause)} after {render_duration(ran)}"
        f"{joint if cause.detail else ''}{cause.detail}{_render_injection(state, cause)}",
        task=str(exited.task),
        evidence=evidence,
        hint=cause.hint,
    )


def _judge_split(state: AttemptState, cause: Cause, crash: CrashRecord, logs: Mapping[TaskId, str]) -> Verdict:
    """The verdict on workers that are out of step; the cause names only the first task that noticed."""
    trainers = sorted(state.policy.trainers)
    names = " and ".join(map(str, trainers)) if len(trainers) == 2 else name_tasks(trainers)
    outsider = find_outsider(state)
    split = render_split(state)
    steps = render_steps(state)
    stopped = [e.task for e in state.exits.values() if was_stopped(state, e) and not failed_by_itself(state, e)]
    return Verdict(
        reference=cause.reference,
        message=f"{names} are out of step{f': {split}' if split else ''}",
        task=None if outsider is None else str(outsider),
        evidence=[
            f"{cause.exited.task} noticed it: {find_sentence(crash.message, PHRASES)}",
            *([steps] if steps else []),
            *([f"stopped by distlaunch: {name_tasks(stopped)}"] if stopped else []),
            f"log: {logs[outsider or cause.exited.task]}",
        ],
        hint=cause.hint,
    )


def _render_injection(state: AttemptState, cause: Cause) -> str:
    """Names a fault of `--chaos` that ended the task, or stopped it."""
    if cause.reference != "stalled" and not find_injected(state, cause.exited):
        return ""
    return render_injection(state, cause.exited.task)


def _render_end(cause: Cause) -> str:
    how, crash = find_own_end(cause.exited), cause.exited.crash
    if crash is not None and crash.thread is None and how.signal in (signal.SIGTERM, signal.SIGKILL):
        return "failed"  # and was stopped while its interpreter was shutting down
    if cause.reference == "stalled":
        return f"was stopped by {how}"
    first = _HOW.get(cause.reference, "")
    if how.signal is not None:
        return f"{first}was killed by {how}"
    return f"{first}{'ended' if how.ok else 'exited'} with status {how.code}"


def render_crash(crash: CrashRecord) -> list[str]:
    """The exception, and the one from which it follows."""
    return [_render_crash(crash), *([f"after {_render_error(crash.first)}"] if crash.first is not None else [])]


def render_crashes(state: AttemptState) -> list[str]:
    """The exceptions of tasks that were stopped, as one that has ended the thread for which the task waits."""
    ends = [event for event in state.exits.values() if event.task in state.stopped and event.crash is not None]
    return [f"{event.task}: {line}" for event in ends if event.crash is not None for line in render_crash(event.crash)]


def _render_crash(crash: CrashRecord) -> str:
    return _render_error(crash, f" (in the thread {crash.thread})" if crash.thread is not None else "")


def _render_error(error: CrashRecord | FirstError, where: str = "") -> str:
    place = f"   {error.file}:{error.line}" if error.file else ""
    text = find_sentence(error.message, SIGNATURES).removeprefix(f"{error.exception}: ")
    shown = [error.exception, text] if error.exception != "SystemExit" else [text]
    return f"{': '.join(filter(None, shown))}{where}{place}"


def _render_follower(state: AttemptState, event: TaskExited, tails: Mapping[TaskId, Sequence[str]]) -> str:
    """Why another task failed; continues a sentence after the time."""
    if is_collateral(event, tails):
        return " because of it"
    if state.has_saved(event):
        return " for the same reason"
    if event.crash is not None and event.crash.thread is None:
        return f": {_render_crash(event.crash)}"
    return f" with {event.exit}"


def _followers(state: AttemptState, cause: Cause, tails: Mapping[TaskId, Sequence[str]]) -> list[str]:
    """What happened to the other tasks."""
    lines = []
    when = failure_time(cause.exited)
    for event in sorted(state.exits.values(), key=failure_time):
        if event is cause.exited or not event.failed or not failed_by_itself(state, event):
            continue
        later = failure_time(event) - when
        why = f" {render_duration(later)} later{_render_follower(state, event, tails)}" if later >= 0 else ", too"
        lines.append(f"{event.task} failed{why}")
    if len(lines) > SHOWN_LIMIT:
        lines[SHOWN_LIMIT:] = [f"{len(lines) - SHOWN_LIMIT} more tasks failed later"]
    early = [event for event in ended_before(state, cause.exited) if event is not cause.exited]
    if early:
        first = when - min(map(ended_time, early))
        names = name_tasks(event.task for event in early)
        lines.append(f"ended with status 0 up to {render_duration(first)} earlier: {names}")
    stopped = [e for e in state.exits.values() if was_stopped(state, e) and not failed_by_itself(state, e)]
    if stopped:
        lines.append(f"stopped by distlaunch: {name_tasks(event.task for event in stopped)}")
    lines += [f"{event.task}: {_render_crash(event.crash)}" for event in stopped if event.crash is not None]
    return lines
