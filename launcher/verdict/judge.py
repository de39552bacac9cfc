"""Why an attempt ended as it did. Pure: from the gang's last state to one sentence and its evidence."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from launcher.errors import EXIT_INFRASTRUCTURE, EXIT_OK, EXIT_TASK_FAILED, EXIT_USAGE
from launcher.gang.stacks import render_places
from launcher.gang.stalls import find_staller, render_stall, render_steps
from launcher.gang.state import Gang, Reason
from launcher.gang.waiting import render_waiting
from launcher.plan.launch_plan import LaunchPlan
from launcher.tasks import TaskId, find_leader, name_tasks
from launcher.verdict.causes import find_cause, is_collateral
from launcher.verdict.models import OutcomeName, Verdict
from launcher.verdict.task_failure import judge_failure
from worker_entry.protocol.values import Problem, TaskExit

_USAGE_REFERENCES = ("no-program", "no-working-directory", "syntax-error", "not-executable", "no-tensorflow")
"""Refusals that are the user's to mend: exit status 2."""
_TASK_REFERENCES = (
    "task-failed",
    "task-killed",
    "out-of-memory",
    "version-mismatch",
    "ended-early",
    "out-of-step",
    "preempted",
)
"""What a task itself has done, or what was done to it: exit status 1."""


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
            verdict = judge_failure(gang, plans, logs, tails)
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
        places = (
            render_places(gang.stacks) if verdict.reference != "out-of-step" else []
        )  # which has them in its message
        more += [*places, f"stacks: {stacks}"]
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
        f"{event.task} finished its program before its interpreter ended with {event.exit}; this does not fail the run"
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
    if gang.separate or gang.never_met:
        evidence.append(f"{name_tasks(sorted(trainers))} {'trained' if gang.separate else 'ran'} without each other")
    what = str(trainers[0]) if len(trainers) == 1 else f"all {len(trainers)} training tasks"
    how = "ended with status 0" if all(gang.exits[task].exit.ok for task in trainers) else "finished"
    return Verdict(reference="succeeded", message=f"{what} {how}", evidence=evidence)


def _judge_refusal(gang: Gang) -> Verdict:
    problems = [(refusal.node, problem) for refusal in gang.refusals for problem in refusal.problems]
    if not problems:
        return Verdict(
            reference="refused", message=f"node {gang.refusals[0].node} refused to start its tasks and gave no reason"
        )
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
        "a program opens its port when it creates MultiWorkerMirroredStrategy; increase timeouts.start_s "
        "(--start-timeout) if it needs longer; 0 turns the time-out off"
    )
    if gang.unheard and gang.unheard.issuperset(missing):
        cure = f"`distlaunch check` shows whether they can reach {find_leader(gang.rules.tasks)}"
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
        place = f"{task} was stopped by {TaskExit(signal=halt.signal)} and did not continue"
    elif task is not None and task in gang.stacks:
        (place,) = render_places({task: gang.stacks[task]})
    blame = f": {place}, and the others wait for it" if place is not None else ""
    return Verdict(
        reference="stalled",
        message=f"{render_stall(gang)}{blame}",
        task=str(task) if task is not None else None,
        evidence=[*filter(None, [render_steps(gang)])],
        cure="increase timeouts.stall_s (--stall-timeout) if a step may take as long; 0 turns the time-out off",
    )


def _judge_drain_timeout(gang: Gang) -> Verdict:
    going = sorted(gang.rules.trainers & gang.stopped)
    done = [task for task in gang.exits if task in gang.rules.trainers and task not in gang.stopped]
    return Verdict(
        reference="drain-timeout",
        message=f"{name_tasks(going)} did not end within {gang.rules.drain_s:g} s after the first task ended, and "
        f"{'is' if len(going) == 1 else 'are'} not at work",
        task=str(going[0]) if len(going) == 1 else None,
        evidence=[f"ended with status 0: {name_tasks(done)}"],
        cure="increase timeouts.drain_s (--drain-timeout) if the others need longer; 0 turns the time-out off",
    )


def _judge_interruption(gang: Gang) -> Verdict:
    assert gang.signal is not None
    if gang.signal == signal.SIGPIPE:
        message = "the reader of the output is gone (SIGPIPE); all tasks were stopped"
    else:
        message = f"interrupted by {TaskExit(signal=gang.signal)}; all tasks were stopped"
    return Verdict(reference="interrupted", message=message)
