"""Why an attempt ended as it did. Pure: from the gang's last state to one sentence and its evidence.

The first death that is *seen* need not be the cause: an interpreter takes about a second to shut down, in which its
peers can fail and end before it. So the cause is the earliest failure by the moment of its exception, and failures
that show only that a peer went away come last.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence

from launcher.errors import EXIT_INFRASTRUCTURE, EXIT_OK, EXIT_TASK_FAILED, EXIT_USAGE
from launcher.events import TaskExited
from launcher.gang import Gang, Reason
from launcher.plan import LaunchPlan, TaskPlan
from launcher.results import OutcomeName, Verdict
from launcher.tasks import TaskId
from worker_entry.values import Problem, TaskExit

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
    "/replica:0/task:",
)
"""How TensorFlow says that a peer has gone; without a name for it of its own."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGKILL)
_TERM_STATUS = 128 + signal.SIGTERM
"""With what a program ends that handles TERM in the way of a shell."""

SHOWN_LIMIT = 8
"""Tasks that a verdict names one by one."""

_USAGE_REFERENCES = ("no-program", "no-working-directory", "syntax-error", "not-executable", "no-tensorflow")
"""Refusals that are the user's to mend: exit status 2."""


def find_cause(gang: Gang) -> TaskExited | None:
    """The failure that all others follow from, if a training task failed."""
    failures = [e for e in gang.exits.values() if e.task.trains and not e.exit.ok and not was_stopped(gang, e)]
    return min(failures, key=lambda e: (is_collateral(e), failure_time(e), e.task), default=None)


def was_stopped(gang: Gang, event: TaskExited) -> bool:
    """Whether we ended the task: it was running when we began to stop, and did not fail by itself meanwhile."""
    if event.task not in gang.stopped:
        return False
    if event.crash is not None:  # what it raised before the stop is its own
        return event.crash.exception == "SystemExit" and event.exit.code == _TERM_STATUS
    return event.exit.code in (0, _TERM_STATUS) or event.exit.signal in _STOP_SIGNALS


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


def judge(gang: Gang, plan: LaunchPlan, logs: Mapping[TaskId, str], *, agents_said: Sequence[str] = ()) -> Verdict:
    """The verdict on a finished attempt.

    Args:
        gang: its last state.
        plan: what was started.
        logs: the paths to show.
        agents_said: the last lines that agents wrote to stderr.
    """
    plans = {task.task: task for task in plan.tasks}
    match _true_reason(gang):
        case Reason.SUCCEEDED:
            verdict = _judge_success(gang)
        case Reason.TASK_FAILED:
            verdict = _judge_failure(gang, plans, logs)
        case Reason.REFUSED:
            verdict = _judge_refusal(gang)
        case Reason.NODE_LOST:
            return _judge_loss(gang, agents_said)
        case Reason.START_TIMEOUT:
            verdict = _judge_start_timeout(gang, plans)
        case Reason.DRAIN_TIMEOUT:
            verdict = _judge_drain_timeout(gang)
        case _:
            verdict = _judge_interruption(gang)
    lost = [_render_loss(gang, node) for node in gang.lost]
    return verdict.model_copy(update={"evidence": [*verdict.evidence, *lost]})


def exit_status(gang: Gang) -> int:
    """distlaunch's own exit status for a finished attempt."""
    if gang.signal is not None:
        return 128 + gang.signal
    match _true_reason(gang):
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


def _true_reason(gang: Gang) -> Reason | None:
    """Why the attempt ended: a task that only missed a peer, on a node that was lost, is not the reason."""
    if gang.reason is Reason.TASK_FAILED and gang.lost:
        cause = find_cause(gang)
        if cause is not None and is_collateral(cause):
            return Reason.NODE_LOST
    return gang.reason


def outcome(gang: Gang) -> OutcomeName:
    if gang.signal is not None:
        return "interrupted"
    return "succeeded" if gang.reason is Reason.SUCCEEDED else "failed"


def _judge_success(gang: Gang) -> Verdict:
    trainers = [task for task in gang.rules.tasks if task.trains]
    evidence = [
        f"{event.task} ended with {event.exit}, which does not fail the run"
        for event in gang.exits.values()
        if not event.task.trains and not event.exit.ok and event.task not in gang.stopped
    ]
    evidence += [f"{task} was still running and was stopped" for task in sorted(gang.stopped)]
    what = str(trainers[0]) if len(trainers) == 1 else f"all {len(trainers)} training tasks"
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
        text = _headline(crash.message)
        shown = [crash.exception, text] if crash.exception != "SystemExit" else [text]
        evidence.append(f"{': '.join(filter(None, shown))}{place}")
    if cause.note:
        evidence.append(f"{plans[cause.task].node}: {cause.note}")
    evidence += _collateral(gang, cause)
    evidence.append(f"log: {logs[cause.task]}")
    return Verdict(
        reference="task-failed",
        message=f"{cause.task} on {plans[cause.task].node} {how} after {ran:.1f} s",
        task=str(cause.task),
        evidence=evidence,
        cure=_cure(gang, cause),
    )


def _headline(message: str) -> str:
    """The line of an exception's message that says most: TensorFlow puts where before what."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    telling = (line for line in lines if any(signature in line for signature in COLLATERAL_SIGNATURES))
    return next(telling, lines[0])[:300]


def _collateral(gang: Gang, cause: TaskExited) -> list[str]:
    lines = []
    for event in sorted(gang.exits.values(), key=failure_time):
        if event is cause or event.exit.ok or was_stopped(gang, event):
            continue
        later = failure_time(event) - failure_time(cause)
        why = "because of it" if is_collateral(event) else f"with {event.exit}"
        lines.append(f"{event.task} failed {later:.1f} s later {why}" if later >= 0 else f"{event.task} failed, too")
    if len(lines) > SHOWN_LIMIT:
        lines[SHOWN_LIMIT:] = [f"{len(lines) - SHOWN_LIMIT} more tasks failed later"]
    early = _ended_before(gang, cause)
    if early:
        first = failure_time(cause) - min(event.time for event in early)
        lines.append(f"ended with status 0 up to {first:.1f} s before: {_names(event.task for event in early)}")
    stopped = [event.task for event in gang.exits.values() if was_stopped(gang, event)]
    if stopped:
        lines.append(f"stopped by distlaunch: {_names(stopped)}")
    return lines


def _ended_before(gang: Gang, cause: TaskExited) -> list[TaskExited]:
    return [e for e in gang.exits.values() if e.exit.ok and e.task.trains and e.time < failure_time(cause)]


def _names(tasks: Iterable[TaskId]) -> str:
    """`worker:0, worker:1 and 6 more`."""
    ordered = sorted(tasks)
    more = f" and {len(ordered) - SHOWN_LIMIT} more" if len(ordered) > SHOWN_LIMIT else ""
    return ", ".join(map(str, ordered[:SHOWN_LIMIT])) + more


def _cure(gang: Gang, cause: TaskExited) -> str:
    crash = cause.crash
    if crash is not None and crash.exception == "ModuleNotFoundError":
        if "'tensorflow'" in crash.message:
            return "install TensorFlow for this Python, or name the one that has it with --python (`python:` in a spec)"
        return "install the module for the Python that the tasks use, or set PYTHONPATH"
    if is_collateral(cause) and _ended_before(gang, cause):
        return "a worker that ends before the others makes them fail: all have to take the same number of steps"
    if cause.exit.signal == signal.SIGKILL:
        return "SIGKILL from nobody is most often the kernel, out of memory: `dmesg` on that node tells"
    return ""


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
            *([f"its tasks: {_names(running)}"] if running else []),
            *(_render_loss(gang, other) for other in rest),
            *agents_said,
        ],
    )


def _render_loss(gang: Gang, node: str) -> str:
    how = "was lost" if node in gang.ready else "cannot be used"
    return f"node {node} {how}: {gang.lost[node]}"


def _judge_start_timeout(gang: Gang, plans: Mapping[TaskId, TaskPlan]) -> Verdict:
    if gang.silent:
        message = f"no answer from {', '.join(sorted(gang.silent))} within {gang.rules.start_s:g} s"
        return Verdict(reference="start-timeout", message=message)
    unborn = gang.rules.tasks - gang.started.keys()
    if unborn:
        message = f"no cluster within {gang.rules.start_s:g} s: not started: {_names(unborn)}"
        return Verdict(reference="start-timeout", message=message)
    missing = gang.missing
    shown = ", ".join(f"{task} (port {gang.ports[task]} on {plans[task].node})" for task in missing[:SHOWN_LIMIT])
    more = f" and {len(missing) - SHOWN_LIMIT} more" if len(missing) > SHOWN_LIMIT else ""
    what = "did not open its port" if len(missing) == 1 else "did not open their ports"
    return Verdict(
        reference="start-timeout",
        message=f"no cluster within {gang.rules.start_s:g} s: {shown}{more} {what}",
        task=str(missing[0]) if len(missing) == 1 else None,
        evidence=[f"up: {_names(gang.listening)}"] if gang.listening else [],
        cure="a program opens its port when it builds MultiWorkerMirroredStrategy; raise timeouts.start_s "
        "(--start-timeout) if it needs longer, 0 turns this off",
    )


def _judge_drain_timeout(gang: Gang) -> Verdict:
    going = sorted(task for task in gang.stopped if task.trains)
    done = [task for task in gang.exits if task.trains and task not in gang.stopped]
    return Verdict(
        reference="drain-timeout",
        message=f"{_names(going)} did not end within {gang.rules.drain_s:g} s of the first that did",
        task=str(going[0]) if len(going) == 1 else None,
        evidence=[f"ended with status 0: {_names(done)}"],
        cure="raise timeouts.drain_s if the others rightly take longer; 0 turns this off",
    )


def _judge_interruption(gang: Gang) -> Verdict:
    assert gang.signal is not None
    if gang.signal == signal.SIGPIPE:
        message = "nobody reads the output any more; all tasks were stopped"
    else:
        message = f"interrupted by {TaskExit(signal=gang.signal)}; all tasks were stopped"
    return Verdict(reference="interrupted", message=message)
