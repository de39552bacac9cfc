"""Why an attempt ended as it did. Pure: from the gang's last state to one sentence and its evidence.

The first death that is *seen* need not be the cause: an interpreter takes about a second to shut down, in which its
peers can fail and end before it. So the cause is the earliest failure by the moment of its exception, and failures
that show only that a peer went away come last.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from launcher.errors import EXIT_INFRASTRUCTURE, EXIT_OK, EXIT_TASK_FAILED, EXIT_USAGE
from launcher.events import TaskExited
from launcher.gang import Gang, Reason
from launcher.plan import LaunchPlan, TaskPlan
from launcher.results import OutcomeName, Verdict
from launcher.tasks import TaskId
from worker_entry.messages import Problem

COLLATERAL_EXCEPTIONS = (
    "UnavailableError",
    "AbortedError",
    "CancelledError",
    "InternalError",
    "DeadlineExceededError",
)
COLLATERAL_SIGNATURES = (
    "Socket closed",
    "Connection reset by peer",
    "failed to connect to all addresses",
    "stopped sending heartbeats",
    "different incarnation",
    "cluster check alive failed",
    "The tasks have crashed",
    "/job:worker/replica:0/task:",
)
"""How TensorFlow says that a peer has gone; without a name for it of its own."""

_USAGE_REFERENCES = ("no-program", "no-working-directory", "syntax-error", "not-executable", "no-tensorflow")
"""Refusals that are the user's to mend: exit status 2."""


def find_cause(gang: Gang) -> TaskExited | None:
    """The failure that all others follow from, if a training task failed."""
    failures = [e for e in gang.exits.values() if e.task.trains and not e.exit.ok and not was_stopped(gang, e)]
    return min(failures, key=lambda e: (is_collateral(e), failure_time(e), e.task), default=None)


def was_stopped(gang: Gang, event: TaskExited) -> bool:
    """Whether we ended the task: it was running when we began to stop, and did not fail by itself meanwhile."""
    if event.task not in gang.stopped or event.crash is not None:
        return False
    return event.exit.ok or event.exit.signal in (signal.SIGTERM, signal.SIGKILL)


def failure_time(event: TaskExited) -> float:
    """When the task failed, in Unix seconds: the raise, if it was one."""
    return event.crash.time if event.crash is not None else event.time


def is_collateral(event: TaskExited) -> bool:
    """Whether the failure shows only that a peer went away."""
    crash = event.crash
    return (
        crash is not None
        and crash.exception in COLLATERAL_EXCEPTIONS
        and any(signature in crash.message for signature in COLLATERAL_SIGNATURES)
    )


def judge(gang: Gang, plan: LaunchPlan, logs: Mapping[TaskId, str]) -> Verdict:
    """The verdict on a finished attempt; `logs` are the paths to show."""
    plans = {task.task: task for task in plan.tasks}
    match gang.reason:
        case Reason.SUCCEEDED:
            return _judge_success(gang)
        case Reason.TASK_FAILED:
            return _judge_failure(gang, plans, logs)
        case Reason.REFUSED:
            return _judge_refusal(gang)
        case Reason.NODE_LOST:
            return _judge_loss(gang)
        case Reason.START_TIMEOUT:
            return _judge_start_timeout(gang, plans)
        case Reason.DRAIN_TIMEOUT:
            return _judge_drain_timeout(gang)
        case _:
            assert gang.signal is not None
            return Verdict(
                reference="interrupted",
                message=f"interrupted by signal {gang.signal}; all tasks were stopped",
            )


def exit_status(gang: Gang) -> int:
    """distlaunch's own exit status for a finished attempt."""
    if gang.signal is not None:
        return 128 + gang.signal
    match gang.reason:
        case Reason.SUCCEEDED:
            return EXIT_OK
        case Reason.TASK_FAILED:
            return EXIT_TASK_FAILED
        case Reason.REFUSED:
            references = {problem.reference for refusal in gang.refusals for problem in refusal.problems}
            usage = not gang.started and references <= {*_USAGE_REFERENCES}
            return EXIT_USAGE if usage else EXIT_INFRASTRUCTURE
        case _:
            return EXIT_INFRASTRUCTURE


def outcome(gang: Gang) -> OutcomeName:
    if gang.signal is not None:
        return "interrupted"
    return "succeeded" if gang.reason is Reason.SUCCEEDED else "failed"


def _judge_success(gang: Gang) -> Verdict:
    trainers = sum(task.trains for task in gang.rules.tasks)
    evidence = [
        f"{event.task} ended with {event.exit}; that does not fail a run"
        for event in gang.exits.values()
        if not event.task.trains and not event.exit.ok and event.task not in gang.stopped
    ]
    evidence += [f"{task} was still running and was stopped" for task in sorted(gang.stopped)]
    what = "the only task" if trainers == 1 else f"all {trainers} training tasks"
    return Verdict(reference="succeeded", message=f"{what} ended with status 0", evidence=evidence)


def _judge_failure(gang: Gang, plans: Mapping[TaskId, TaskPlan], logs: Mapping[TaskId, str]) -> Verdict:
    cause = find_cause(gang)
    assert cause is not None
    ran = failure_time(cause) - gang.started[cause.task].time
    how = f"exited with status {cause.exit.code}" if cause.exit.signal is None else f"was ended by {cause.exit}"
    evidence = []
    crash = cause.crash
    if crash is not None:
        place = f"   {crash.file}:{crash.line}" if crash.file else ""
        text = crash.message.strip().partition("\n")[0]
        shown = f"{crash.exception}: {text[:300]}" if crash.exception != "SystemExit" else text[:300]
        evidence.append(f"{shown}{place}")
    evidence += _collateral(gang, cause)
    evidence.append(f"log: {logs[cause.task]}")
    return Verdict(
        reference="task-failed",
        message=f"{cause.task} on {plans[cause.task].node} {how} after {ran:.1f} s",
        task=str(cause.task),
        evidence=evidence,
        cure=_cure(cause),
    )


def _collateral(gang: Gang, cause: TaskExited) -> list[str]:
    lines = []
    for event in sorted(gang.exits.values(), key=failure_time):
        if event is cause or event.exit.ok or was_stopped(gang, event):
            continue
        later = failure_time(event) - failure_time(cause)
        lines.append(f"{event.task} failed {later:.1f} s later" if later >= 0 else f"{event.task} failed, too")
    early = [e for e in gang.exits.values() if e.exit.ok and e.task.trains and e.time < failure_time(cause)]
    lines += [f"{e.task} had ended with status 0, {failure_time(cause) - e.time:.1f} s before" for e in early]
    stopped = sorted(event.task for event in gang.exits.values() if was_stopped(gang, event))
    if stopped:
        lines.append(f"stopped by distlaunch: {', '.join(map(str, stopped))}")
    return lines


def _cure(cause: TaskExited) -> str:
    crash = cause.crash
    if crash is not None and crash.exception == "ModuleNotFoundError":
        if "'tensorflow'" in crash.message:
            return "install TensorFlow for this Python, or name the one that has it with --python (`python:` in a spec)"
        return "install the module for the Python that the tasks use, or set PYTHONPATH"
    return ""


def _judge_refusal(gang: Gang) -> Verdict:
    problems = [(refusal.node, problem) for refusal in gang.refusals for problem in refusal.problems]
    first = problems[0][1]
    alike = [node for node, problem in problems if _same(problem, first)]
    rest = [(node, problem) for node, problem in problems if not _same(problem, first)]
    where = f"{first.task}: " if first.task and len(alike) == 1 else ""
    return Verdict(
        reference=first.reference,
        message=f"{where}{first.message}",
        task=first.task,
        evidence=[f"{problem.task or node}: {problem.message} [{problem.reference}]" for node, problem in rest],
        cure=first.cure,
    )


def _same(one: Problem, other: Problem) -> bool:
    return (one.reference, one.message) == (other.reference, other.message)


def _judge_loss(gang: Gang) -> Verdict:
    (node, reason), *rest = sorted(gang.lost.items())
    return Verdict(
        reference="node-lost",
        message=f"{node}: {reason}",
        evidence=[f"{other}: {why}" for other, why in rest],
    )


def _judge_start_timeout(gang: Gang, plans: Mapping[TaskId, TaskPlan]) -> Verdict:
    silent = sorted(gang.rules.nodes.keys() - gang.prepared)
    if silent:
        message = f"no answer from {', '.join(silent)} within {gang.rules.start_s:g} s"
        return Verdict(reference="start-timeout", message=message)
    missing = [task for task in gang.missing if task in gang.started]
    shown = ", ".join(f"{task} (port {gang.ports[task]} on {plans[task].node})" for task in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    up = sorted(gang.listening)
    return Verdict(
        reference="start-timeout",
        message=f"no cluster within {gang.rules.start_s:g} s: {shown}{more} did not open the port",
        task=str(missing[0]) if len(missing) == 1 else None,
        evidence=[f"up: {', '.join(map(str, up))}"] if up else [],
        cure="a program opens its port when it builds MultiWorkerMirroredStrategy; raise timeouts.start_s "
        "(--start-timeout) if it needs longer, 0 turns this off",
    )


def _judge_drain_timeout(gang: Gang) -> Verdict:
    done = sorted(task for task, event in gang.exits.items() if task.trains)
    going = sorted(task for task in gang.stopped if task.trains)
    return Verdict(
        reference="drain-timeout",
        message=f"{', '.join(map(str, going))} did not end within {gang.rules.drain_s:g} s of the first that did",
        task=str(going[0]) if len(going) == 1 else None,
        evidence=[f"ended with status 0: {', '.join(map(str, done))}"],
        cure="raise timeouts.drain_s if the others rightly take longer; 0 turns this off",
    )
