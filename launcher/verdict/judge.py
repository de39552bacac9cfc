"""Judges why an attempt ended: from its last state to one sentence and its evidence."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from launcher.errors import EXIT_OK, EXIT_USAGE
from launcher.failures import USER_ERRORS, find_exit_status
from launcher.gang.checks.findings import SEND_FOLDER
from launcher.gang.claims import render_busy_gpus
from launcher.gang.events import EndAnnounced
from launcher.gang.faults import render_injection
from launcher.gang.state import AttemptState, Reason
from launcher.gang.waiting import render_waiting
from launcher.gang.watch.stacks import render_places
from launcher.plan.launch_plan import LaunchPlan
from launcher.spec.strategies import JOIN_CALLS
from launcher.tasks import LOCAL, TaskId, find_leader, name_tasks
from launcher.verdict.causes import find_cause, is_collateral
from launcher.verdict.models import OutcomeName, Verdict
from launcher.verdict.stall_blame import find_staller, render_stall, render_steps
from launcher.verdict.task_failure import judge_failure, render_crashes
from launcher.wording import count_of, render_duration, render_run
from worker_entry.protocol.values import Problem, TaskExit

_RUN = "run: "
"""How the hint of a node begins that is a command for its own machine."""
_MISSING = ("no-program", "no-working-directory")
SIGNAL_S = 1.0
"""How much earlier than its agent a task may get a signal that is sent to both."""


def judge(
    state: AttemptState,
    plan: LaunchPlan,
    logs: Mapping[TaskId, str],
    *,
    tails: Mapping[TaskId, Sequence[str]] | None = None,
    agent_stderr: Sequence[str] = (),
    stacks: str = "",
) -> Verdict:
    """The verdict on a finished attempt.

    Args:
        state: the last state of the attempt.
        plan: the plan of the started tasks.
        logs: the paths of the tasks' logs.
        tails: the last lines of the logs of tasks that failed.
        agent_stderr: the last lines that agents wrote to stderr.
        stacks: the file with the stacks of all tasks, if the tasks were asked for them.
    """
    plans = {task.task: task for task in plan.tasks}
    tails = tails or {}
    if state.announced is not None and _is_announced(state):
        return _judge_announced(state, state.announced)
    match _find_reason(state, tails):
        case Reason.SUCCEEDED:
            verdict = _judge_success(state)
        case Reason.TASK_FAILED:
            verdict = judge_failure(state, plans, logs, tails)
        case Reason.REFUSED:
            verdict = _judge_refusal(state)
        case Reason.NODE_LOST:
            return _judge_loss(state, agent_stderr)
        case Reason.GPUS_BUSY:
            verdict = _judge_busy_gpus(state)
        case Reason.START_TIMEOUT:
            verdict = _judge_start_timeout(state)
        case Reason.STALLED:
            verdict = _judge_stall(state)
        case Reason.DRAIN_TIMEOUT:
            verdict = _judge_drain_timeout(state)
        case _:
            verdict = _judge_interruption(state)
    more = [_render_loss(state, node) for node in _order_lost(state)]
    if state.reason in (Reason.START_TIMEOUT, Reason.STALLED, Reason.DRAIN_TIMEOUT):
        more += render_crashes(state)
    if state.stacks:
        if verdict.reference != "out-of-step":  # its message already has the places
            more += render_places(state.stacks)
        more.append(f"stacks: {stacks}")
    return verdict.model_copy(update={"evidence": [*verdict.evidence, *more]})


def exit_status(state: AttemptState, verdict: Verdict) -> int:
    """distlaunch's own exit status for a finished attempt."""
    if state.signal is not None:
        return 128 + state.signal
    if verdict.reference == "interrupted":
        return 128 + signal.SIGTERM
    if verdict.reference == "succeeded":
        return EXIT_OK
    references = {problem.reference for refusal in state.refusals for problem in refusal.problems}
    if references and not state.started and references <= USER_ERRORS.keys():
        return EXIT_USAGE
    return find_exit_status(verdict.reference)


def _find_reason(state: AttemptState, tails: Mapping[TaskId, Sequence[str]]) -> Reason | None:
    """Why the attempt ended: if a node was lost, a task that failed only because a peer was gone is not the reason."""
    if state.reason is Reason.TASK_FAILED and state.lost:
        cause = find_cause(state, tails)
        if cause is not None and is_collateral(cause.exited, tails):
            return Reason.NODE_LOST
    return state.reason


def outcome(state: AttemptState) -> OutcomeName:
    if state.signal is not None or (
        state.announced is not None and state.announced.reference == "interrupted" and _is_announced(state)
    ):
        return "interrupted"
    return "succeeded" if state.reason is Reason.SUCCEEDED else "failed"


def _is_announced(state: AttemptState) -> bool:
    """Whether the attempt ended because its nodes are taken away, and not because of an earlier failure."""
    if state.reason is Reason.ANNOUNCED:
        return True
    if state.reason is not Reason.TASK_FAILED:
        return state.reason in (Reason.NODE_LOST, Reason.STALLED)
    failed = [event for event in state.exits.values() if event.failed and event.task in state.policy.trainers]
    signalled = min((event.time for event in state.signalled.values()), default=None)
    if signalled is not None and failed:
        return min(event.time for event in failed) > signalled - SIGNAL_S
    return any(event.exit.signal in (signal.SIGTERM, signal.SIGKILL) for event in failed)


def _judge_announced(state: AttemptState, end: EndAnnounced) -> Verdict:
    ends: dict[str, list[TaskId]] = {}
    for task, event in sorted(state.exits.items()):
        ends.setdefault(str(event.exit), []).append(task)
    evidence = [f"{name_tasks(tasks)} ended with {how}" for how, tasks in ends.items()]
    return Verdict(reference=end.reference, message=end.message, evidence=[*end.evidence, *evidence])


def _judge_success(state: AttemptState) -> Verdict:
    trainers = [*state.policy.trainers]
    known = state.policy.trainers | state.policy.servers | state.stopped
    evidence = [
        f"{event.task} ended with {event.exit}, which does not fail the run"
        for event in state.exits.values()
        if event.task not in known and event.failed
    ]
    evidence += [
        f"{event.task} finished its program before its interpreter ended with {event.exit}; this does not fail the run"
        for event in state.exits.values()
        if event.finished is not None and not event.exit.ok and not event.task.is_auxiliary
    ]
    evidence += [
        f"{task} was still running and was stopped"
        for task in sorted(state.stopped - state.policy.servers - state.policy.auxiliary - state.programs.keys())
    ]
    evidence += [
        f"{task} was restarted individually, after {', '.join(str(end.exited.exit) for end in ends)}"
        for task, ends in sorted(state.restarted.items())
    ]
    if state.separate:
        evidence.append(f"{name_tasks(sorted(trainers))} trained separately")
    what = _name_all(trainers)
    ends = [state.exits[task] for task in trainers if task in state.exits]
    how = "ended with status 0" if len(ends) == len(trainers) and all(end.exit.ok for end in ends) else "finished"
    return Verdict(reference="succeeded", message=f"{what} {how}", evidence=evidence)


def _name_all(tasks: Sequence[TaskId]) -> str:
    """`worker:0`, `both workers`, `all 3 workers`, `the chief and 2 workers`."""
    if len(tasks) == 1:
        return str(tasks[0])
    workers = [task for task in tasks if task.type == "worker"]
    if len(workers) < len(tasks):
        return f"the chief and {count_of(len(workers), 'worker')}"
    return "both workers" if len(tasks) == 2 else f"all {len(tasks)} workers"


def _judge_refusal(state: AttemptState) -> Verdict:
    order = {node: number for number, node in enumerate(state.policy.nodes)}
    refusals = sorted(state.refusals, key=lambda refusal: order[refusal.node])
    problems = [(refusal.node, problem) for refusal in refusals for problem in refusal.problems]
    if not problems:
        return Verdict(
            reference="refused", message=f"node {state.refusals[0].node} refused to start its tasks and gave no reason"
        )
    first = problems[0][1]
    alike = [node for node, problem in problems if _same(problem, first)]
    rest = [(node, problem) for node, problem in problems if not _same(problem, first)]
    where = render_place(alike[0], first) if len(alike) == 1 and (first.task or alike[0] != LOCAL) else ""
    return Verdict(
        reference=first.reference,
        message=f"{where}{first.message}",
        task=first.task,
        evidence=[f"{render_place(node, problem)}{problem.message} [{problem.reference}]" for node, problem in rest],
        hint=find_hint(first, alike, is_sent=alike[0] in state.policy.syncs),
    )


def find_hint(problem: Problem, nodes: Sequence[str], *, is_sent: bool) -> str:
    """What to do about a problem that these nodes have; they know neither their names nor that folders can be sent.

    `is_sent`: whether the program's folder is sent to them.
    """
    if problem.hint.startswith(_RUN):
        return render_run(list(dict.fromkeys(nodes)), problem.hint.removeprefix(_RUN))
    if not problem.hint and not is_sent and problem.reference in _MISSING and LOCAL not in nodes:
        return SEND_FOLDER
    return problem.hint


def render_place(node: str, problem: Problem) -> str:
    """`worker:1 on gpu-a: `, `worker:1: ` or `gpu-a: `; without the node if the message itself names it."""
    is_named = node in {word.strip(",;:") for word in problem.message.split()}
    if problem.task is None:
        return "" if is_named else f"{node}: "
    return f"{problem.task}: " if is_named or node == LOCAL else f"{problem.task} on {node}: "


def _same(one: Problem, other: Problem) -> bool:
    return (one.reference, one.message) == (other.reference, other.message)


def _judge_loss(state: AttemptState, agent_stderr: Sequence[str]) -> Verdict:
    node, *rest = _order_lost(state)
    running = state.policy.nodes[node] & state.stopped
    return Verdict(
        reference="node-lost" if node in state.ready else "node-unreachable",
        message=_render_loss(state, node),
        evidence=[
            *([f"its tasks: {name_tasks(running)}"] if running else []),
            *(_render_loss(state, other) for other in rest),
            *agent_stderr,
        ],
    )


def _order_lost(state: AttemptState) -> list[str]:
    """The lost nodes: those that were ready in the order of their losses, then the others in the order of the spec."""
    never = [node for node in state.policy.nodes if node in state.lost and node not in state.ready]
    return [*(node for node in state.lost if node in state.ready), *never]


def _render_loss(state: AttemptState, node: str) -> str:
    how = "was lost" if node in state.ready else "cannot be used"
    return f"node {node} {how}: {state.lost[node]}"


def _judge_busy_gpus(state: AttemptState) -> Verdict:
    waited = render_duration(state.policy.wait_gpus_s or 0.0)
    return Verdict(
        reference="gpus-busy",
        message=f"too few free GPUs within {waited}: {render_busy_gpus(state.lacking)}",
        hint="wait longer with --wait-gpus, or use other nodes",
    )


def _judge_start_timeout(state: AttemptState) -> Verdict:
    if state.silent:
        message = f"no answer from {', '.join(sorted(state.silent))} within {state.policy.start_s:g} s"
        return Verdict(reference="start-timeout", message=message)
    not_started = state.policy.tasks - state.started.keys()
    if not_started:
        message = f"no cluster within {state.policy.start_s:g} s: not started: {name_tasks(not_started)}"
        return Verdict(reference="start-timeout", message=message)
    missing = state.missing
    joins = "opens its port when it creates MultiWorkerMirroredStrategy"
    if state.policy.strategy.reports_joining:
        joins = f"joins when it calls {' or '.join(JOIN_CALLS)}"
    hint = f"a program {joins}; increase timeouts.start_s if it needs longer; 0 disables the timeout"
    if state.not_joined and state.not_joined.issuperset(missing):
        hint = f"`distlaunch check` shows whether they can reach {find_leader(state.policy.tasks)}"
    due = max(event.time for event in state.started.values()) + state.policy.start_s
    ended = min((event.time for event in state.exits.values()), default=due)
    return Verdict(
        reference="start-timeout",
        message=f"no cluster within {state.policy.start_s:g} s: {render_waiting(state, ended)}",
        task=str(missing[0]) if len(missing) == 1 else None,
        hint=hint,
    )


def _judge_stall(state: AttemptState) -> Verdict:
    task = find_staller(state)
    halt = state.halted.get(task) if task is not None else None
    place = None
    if halt is not None:
        place = f"{task} was stopped by {TaskExit(signal=halt.signal)} and did not continue"
        place += render_injection(state, halt.task)
    elif task is not None and task in state.stacks:
        (place,) = render_places({task: state.stacks[task]})
    blame = f": {place}, and the others wait for it" if place is not None else ""
    return Verdict(
        reference="stalled",
        message=f"{render_stall(state)}{blame}",
        task=str(task) if task is not None else None,
        evidence=[*filter(None, [render_steps(state)])],
        hint="increase timeouts.stall_s if a step may take that long; 0 disables the timeout",
    )


def _judge_drain_timeout(state: AttemptState) -> Verdict:
    going = sorted(state.policy.trainers & state.stopped - state.ended_before_stop)
    done = sorted(state.policy.trainers - {*going})
    odd = [tasks[0] for tasks in (going, done) if len(tasks) == 1]  # of two tasks, the one that did not end
    first = f"{done[0]}, the first task," if odd == done else "the first task"
    return Verdict(
        reference="drain-timeout",
        message=f"{name_tasks(going)} did not end within {state.policy.drain_s:g} s after {first} ended, and "
        f"{'is' if len(going) == 1 else 'are'} not at work",
        task=str(odd[0]) if odd else None,
        evidence=[f"ended with status 0: {name_tasks(done)}"],
        hint="increase timeouts.drain_s if the others need longer; 0 disables the timeout",
    )


def _judge_interruption(state: AttemptState) -> Verdict:
    assert state.signal is not None
    if state.signal == signal.SIGPIPE:
        message = "the reader of the output is gone (SIGPIPE); all tasks were stopped"
    elif state.interrupts and state.signal != signal.SIGINT:
        message = "stopped by `distlaunch down`"
    else:
        message = f"interrupted by {TaskExit(signal=state.signal)}; all tasks were stopped"
    return Verdict(reference="interrupted", message=message)
