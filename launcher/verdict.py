"""Why an attempt ended as it did. Pure: from the gang's last state to one sentence and its evidence."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from launcher.causes import (
    COLLATERAL_SIGNATURES,
    Cause,
    ended_before,
    ended_time,
    failure_time,
    find_cause,
    is_collateral,
    was_stopped,
)
from launcher.errors import EXIT_INFRASTRUCTURE, EXIT_OK, EXIT_TASK_FAILED, EXIT_USAGE
from launcher.gang import SAVED_STATUS
from launcher.gang_state import Gang, Reason
from launcher.plan import LaunchPlan, TaskPlan
from launcher.results import OutcomeName, Verdict
from launcher.stacks import render_places
from launcher.stalls import find_staller, render_stall, render_steps
from launcher.tasks import TaskId, find_leader, name_tasks
from launcher.waiting import render_waiting
from worker_entry.values import CrashRecord, Problem, TaskExit

SHOWN_LIMIT = 8
"""Tasks that a verdict names one by one."""

_USAGE_REFERENCES = ("no-program", "no-working-directory", "syntax-error", "not-executable", "no-tensorflow")
"""Refusals that are the user's to mend: exit status 2."""
_TASK_REFERENCES = ("task-failed", "task-killed", "out-of-memory", "version-mismatch", "ended-early", "preempted")
"""What a task itself has done, or what was done to it: exit status 1."""
_HOW = {"out-of-memory": "ran out of memory: it ", "preempted": "was preempted: it "}


def judge(
    gang: Gang,
    plan: LaunchPlan,
    logs: Mapping[TaskId, str],
    *,
    tails: Mapping[TaskId, Sequence[str]] | None = None,
    agents_said: Sequence[str] = (),
    stacks: str = "",
) -> Verdict:
    """The verdict on a finished attempt.

    Args:
        gang: its last state.
        plan: what was started.
        logs: the paths to show.
        tails: the last lines of the logs of tasks that failed.
        agents_said: the last lines that agents wrote to stderr.
        stacks: the file of what all tasks were doing, if they were asked.
    """
    plans = {task.task: task for task in plan.tasks}
    tails = tails or {}
    match _true_reason(gang, tails):
        case Reason.SUCCEEDED:
            verdict = _judge_success(gang)
        case Reason.TASK_FAILED:
            verdict = _judge_failure(gang, plans, logs, tails)
        case Reason.REFUSED:
            verdict = _judge_refusal(gang)
        case Reason.NODE_LOST:
            return _judge_loss(gang, agents_said)
        case Reason.START_TIMEOUT:
            verdict = _judge_start_timeout(gang)
        case Reason.STALLED:
            verdict = _judge_stall(gang)
        case Reason.DRAIN_TIMEOUT:
            verdict = _judge_drain_timeout(gang)
        case _:
            verdict = _judge_interruption(gang)
    more = [_render_loss(gang, node) for node in gang.lost]
    if gang.stacks:
        more += [*render_places(gang.stacks), f"stacks: {stacks}"]
    return verdict.model_copy(update={"evidence": [*verdict.evidence, *more]})


def exit_status(gang: Gang, verdict: Verdict) -> int:
    """distlaunch's own exit status for a finished attempt."""
    if gang.signal is not None:
        return 128 + gang.signal
    if verdict.reference == "succeeded":
        return EXIT_OK
    if verdict.reference in _TASK_REFERENCES:
        return EXIT_TASK_FAILED
    references = {problem.reference for refusal in gang.refusals for problem in refusal.problems}
    if references and not gang.started and references <= {*_USAGE_REFERENCES}:
        return EXIT_USAGE
    return EXIT_INFRASTRUCTURE


def _true_reason(gang: Gang, tails: Mapping[TaskId, Sequence[str]]) -> Reason | None:
    """Why the attempt ended: a task that only missed a peer, on a node that was lost, is not the reason."""
    if gang.reason is Reason.TASK_FAILED and gang.lost:
        cause = find_cause(gang, tails)
        if cause is not None and is_collateral(cause.exited, tails):
            return Reason.NODE_LOST
    return gang.reason


def outcome(gang: Gang) -> OutcomeName:
    if gang.signal is not None:
        return "interrupted"
    return "succeeded" if gang.reason is Reason.SUCCEEDED else "failed"


def _judge_success(gang: Gang) -> Verdict:
    trainers = [*gang.rules.trainers]
    evidence = [
        f"{event.task} ended with {event.exit}, which does not fail the run"
        for event in gang.exits.values()
        if event.task not in gang.rules.trainers | gang.rules.servers | gang.stopped and event.failed
    ]
    evidence += [
        f"{event.task} had come to its end when {event.exit} ended its interpreter, which does not fail the run"
        for event in gang.exits.values()
        if event.finished is not None and not event.exit.ok and not event.task.is_side
    ]
    evidence += [
        f"{task} was still running and was stopped"
        for task in sorted(gang.stopped - gang.rules.servers - gang.rules.sides)
    ]
    evidence += [
        f"{task} was started again alone, after {', '.join(str(end.exited.exit) for end in ends)}"
        for task, ends in sorted(gang.returned.items())
    ]
    what = str(trainers[0]) if len(trainers) == 1 else f"all {len(trainers)} training tasks"
    how = "ended with status 0" if all(gang.exits[task].exit.ok for task in trainers) else "came to the program's end"
    return Verdict(reference="succeeded", message=f"{what} {how}", evidence=evidence)


def _judge_failure(
    gang: Gang,
    plans: Mapping[TaskId, TaskPlan],
    logs: Mapping[TaskId, str],
    tails: Mapping[TaskId, Sequence[str]],
) -> Verdict:
    cause = find_cause(gang, tails)
    assert cause is not None
    exited = cause.exited
    evidence = [] if exited.crash is None else [_render_crash(exited.crash)]
    evidence += _followers(gang, cause, tails)
    evidence.append(f"log: {logs[exited.task]}")
    ran = failure_time(exited) - gang.started[exited.task].time
    joint = {"ended-early": ", ", "stalled": " "}.get(cause.reference, ": ")
    return Verdict(
        reference=cause.reference,
        message=f"{exited.task} on {plans[exited.task].node} {_render_end(cause)} after {ran:.1f} s"
        f"{joint if cause.detail else ''}{cause.detail}",
        task=str(exited.task),
        evidence=evidence,
        cure=cause.cure,
    )


def _render_end(cause: Cause) -> str:
    how, crash = cause.exited.exit, cause.exited.crash
    if crash is not None and crash.thread is None and how.signal in (signal.SIGTERM, signal.SIGKILL):
        return "failed"  # and was stopped while its interpreter shut down
    if cause.reference == "stalled":
        return f"was stopped by {how}"
    first = _HOW.get(cause.reference, "")
    if how.signal is not None:
        return f"{first}was ended by {how}"
    return f"{first}{'ended' if how.ok else 'exited'} with status {how.code}"


def _render_crash(crash: CrashRecord) -> str:
    place = f"   {crash.file}:{crash.line}" if crash.file else ""
    text = _headline(crash.message).removeprefix(f"{crash.exception}: ")
    shown = [crash.exception, text] if crash.exception != "SystemExit" else [text]
    thread = f" (in the thread {crash.thread})" if crash.thread is not None else ""
    return f"{': '.join(filter(None, shown))}{thread}{place}"


def _headline(message: str) -> str:
    """The line of an exception's message that says most: TensorFlow puts where before what."""
    _, found, inner = message.rpartition("Traceback (most recent call last):\n")
    raised = [line for line in inner.splitlines() if line and not line[0].isspace()]
    if found and raised:  # what the user's function has raised in a tf.data pipeline
        return raised[0][:300]
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    telling = (line for line in lines if any(signature in line for signature in COLLATERAL_SIGNATURES))
    return next(telling, lines[-1] if lines[0] == "in user code:" else lines[0])[:300]


def _followers(gang: Gang, cause: Cause, tails: Mapping[TaskId, Sequence[str]]) -> list[str]:
    """What became of the other tasks."""
    lines = []
    when = failure_time(cause.exited)
    for event in sorted(gang.exits.values(), key=failure_time):
        if event is cause.exited or not event.failed or was_stopped(gang, event):
            continue
        later = failure_time(event) - when
        collateral = is_collateral(event, tails)
        why = "because of it" if collateral else "for the same reason" if event.exit.code == SAVED_STATUS else None
        why = why or f"with {event.exit}"
        lines.append(f"{event.task} failed {later:.1f} s later {why}" if later >= 0 else f"{event.task} failed, too")
    if len(lines) > SHOWN_LIMIT:
        lines[SHOWN_LIMIT:] = [f"{len(lines) - SHOWN_LIMIT} more tasks failed later"]
    early = [event for event in ended_before(gang, cause.exited) if event is not cause.exited]
    if early:
        first = when - min(map(ended_time, early))
        lines.append(f"ended with status 0 up to {first:.1f} s before: {name_tasks(event.task for event in early)}")
    stopped = [event for event in gang.exits.values() if was_stopped(gang, event)]
    if stopped:
        lines.append(f"stopped by distlaunch: {name_tasks(event.task for event in stopped)}")
    lines += [f"{event.task}: {_render_crash(event.crash)}" for event in stopped if event.crash is not None]
    return lines


def _judge_refusal(gang: Gang) -> Verdict:
    problems = [(refusal.node, problem) for refusal in gang.refusals for problem in refusal.problems]
    if not problems:
        return Verdict(reference="refused", message=f"node {gang.refusals[0].node} refused, and did not say why")
    first = problems[0][1]
    alike = [node for node, problem in problems if _same(problem, first)]
    rest = [(node, problem) for node, problem in problems if not _same(problem, first)]
    where = _render_place(alike[0], first) if len(alike) == 1 and (first.task or alike[0] != "local") else ""
    return Verdict(
        reference=first.reference,
        message=f"{where}{first.message}",
        task=first.task,
        evidence=[f"{_render_place(node, problem)}{problem.message} [{problem.reference}]" for node, problem in rest],
        cure=first.cure,
    )


def _render_place(node: str, problem: Problem) -> str:
    """`worker:1: ` or `gpu-a: `; nothing where the message itself names the node."""
    if problem.task is None and node in {word.strip(",;:") for word in problem.message.split()}:
        return ""
    return f"{problem.task or node}: "


def _same(one: Problem, other: Problem) -> bool:
    return (one.reference, one.message) == (other.reference, other.message)


def _judge_loss(gang: Gang, agents_said: Sequence[str]) -> Verdict:
    node, *rest = gang.lost
    running = gang.rules.nodes[node] & gang.stopped
    return Verdict(
        reference="node-lost" if node in gang.ready else "node-unreachable",
        message=_render_loss(gang, node),
        evidence=[
            *([f"its tasks: {name_tasks(running)}"] if running else []),
            *(_render_loss(gang, other) for other in rest),
            *agents_said,
        ],
    )


def _render_loss(gang: Gang, node: str) -> str:
    how = "was lost" if node in gang.ready else "cannot be used"
    return f"node {node} {how}: {gang.lost[node]}"


def _judge_start_timeout(gang: Gang) -> Verdict:
    if gang.silent:
        message = f"no answer from {', '.join(sorted(gang.silent))} within {gang.rules.start_s:g} s"
        return Verdict(reference="start-timeout", message=message)
    unborn = gang.rules.tasks - gang.started.keys()
    if unborn:
        message = f"no cluster within {gang.rules.start_s:g} s: not started: {name_tasks(unborn)}"
        return Verdict(reference="start-timeout", message=message)
    missing = gang.missing
    cure = (
        "a program opens its port when it builds MultiWorkerMirroredStrategy; raise timeouts.start_s "
        "(--start-timeout) if it needs longer, 0 turns this off"
    )
    if gang.unheard and gang.unheard.issuperset(missing):
        cure = f"`distlaunch check` tells whether they can reach {find_leader(gang.rules.tasks)}"
    due = max(event.time for event in gang.started.values()) + gang.rules.start_s
    ended = min((event.time for event in gang.exits.values()), default=due)
    return Verdict(
        reference="start-timeout",
        message=f"no cluster within {gang.rules.start_s:g} s: {render_waiting(gang, ended)}",
        task=str(missing[0]) if len(missing) == 1 else None,
        cure=cure,
    )


def _judge_stall(gang: Gang) -> Verdict:
    task = find_staller(gang)
    halt = gang.halted.get(task) if task is not None else None
    place = None
    if halt is not None:
        place = f"{task} was stopped by {TaskExit(signal=halt.signal)} and did not go on"
    elif task is not None and task in gang.stacks:
        (place,) = render_places({task: gang.stacks[task]})
    blame = f": {place}, and the others wait for it" if place is not None else ""
    return Verdict(
        reference="stalled",
        message=f"{render_stall(gang)}{blame}",
        task=str(task) if task is not None else None,
        evidence=[*filter(None, [render_steps(gang)])],
        cure="raise timeouts.stall_s (--stall-timeout) if it rightly takes longer; 0 turns this off",
    )


def _judge_drain_timeout(gang: Gang) -> Verdict:
    going = sorted(gang.rules.trainers & gang.stopped)
    done = [task for task in gang.exits if task in gang.rules.trainers and task not in gang.stopped]
    return Verdict(
        reference="drain-timeout",
        message=f"{name_tasks(going)} did not end within {gang.rules.drain_s:g} s of the first that did",
        task=str(going[0]) if len(going) == 1 else None,
        evidence=[f"ended with status 0: {name_tasks(done)}"],
        cure="raise timeouts.drain_s (--drain-timeout) if the others rightly take longer; 0 turns this off",
    )


def _judge_interruption(gang: Gang) -> Verdict:
    assert gang.signal is not None
    if gang.signal == signal.SIGPIPE:
        message = "nobody reads the output any more; all tasks were stopped"
    else:
        message = f"interrupted by {TaskExit(signal=gang.signal)}; all tasks were stopped"
    return Verdict(reference="interrupted", message=message)
