"""Finds the one cause of a failed attempt: the task, and how it failed, from the last state and the logs' last lines.

The first exit that is *seen* need not be the cause: an interpreter takes about a second to shut down, and its peers
can fail and end within that second. So the cause is the failure with the earliest exception, and failures that only
show that a peer is gone come last.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from launcher.gang.events import ProgramEnded, TaskExited
from launcher.gang.faults import find_injected
from launcher.gang.state import AttemptState, make_exit
from launcher.tasks import TaskId
from launcher.verdict.known_failures import find_known
from worker_entry.protocol.collateral import has_collateral_line, is_collateral_crash
from worker_entry.protocol.frozen import dataclass, replace
from worker_entry.protocol.values import TaskExit

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGKILL)
_SAME_STEPS = "all workers must run the same number of steps: when one ends early, the others fail"
_TERM_STATUS = 128 + signal.SIGTERM
"""The exit status of a program that handles SIGTERM as a shell does."""


@dataclass(frozen=True)
class Cause:
    """The cause of a failed attempt: the end of a task, the class of the failure, and further facts.

    `absent`: the task that the one that ended could not reach, because it had not opened its port.
    """

    exited: TaskExited
    reference: str
    detail: str = ""
    hint: str = ""
    absent: TaskId | None = None


def find_cause(state: AttemptState, tails: Mapping[TaskId, Sequence[str]]) -> Cause | None:
    """Finds the failure that led to all others, if a training task failed.

    Args:
        state: the last state of the attempt.
        tails: the last lines of the logs of tasks that failed.
    """
    ends = [*state.exits.values(), *map(make_exit, [*state.raised, *_find_hidden(state)])]
    failures = [e for e in ends if state.fails(e) and failed_by_itself(state, e)]
    if not failures:
        return None
    first = min(failures, key=lambda e: (is_collateral(e, tails), failure_time(e), e.task))
    if not is_collateral(first, tails):
        return classify(state, first, tails.get(first.task, ()))
    early = ended_before(state, first)
    if early:
        if 1 < len(early) == len(state.policy.trainers) - 1:  # the others agree on the number of steps
            return Cause(first, "ended-early", "when all others had finished", _SAME_STEPS)
        end = min(early, key=lambda e: (ended_time(e), e.task))
        return Cause(end, "ended-early", "before the others had finished", _SAME_STEPS)
    halted = [h for h in state.halted.values() if h.task in state.policy.trainers and h.time < failure_time(first)]
    if halted:
        halt = min(halted, key=lambda h: (h.time, h.task))
        exited = TaskExited(halt.task, TaskExit(signal=halt.signal), halt.time)
        return Cause(exited, "stalled", "and did not continue", "SIGCONT continues a stopped process: `kill -CONT PID`")
    cause = classify(state, first, tails.get(first.task, ()))
    absent = [*(state.policy.forming & state.policy.trainers - state.listening.keys())]
    known = cause.reference == "task-failed" and len(absent) == 1 and absent != [first.task]
    return replace(cause, absent=absent[0]) if known else cause


def _find_hidden(state: AttemptState) -> list[ProgramEnded]:
    """The programs that have raised in processes that then exited with status 0, as an exit handler may make them."""
    raised = [program for program in state.programs.values() if program.crash is not None]
    return [program for program in raised if program.task in state.exits and not state.exits[program.task].failed]


def was_stopped(state: AttemptState, event: TaskExited) -> bool:
    """Whether the task was running when we began to stop the tasks, and ended as a stopped task does.

    The task may have raised before: an interpreter that is shutting down still counts as running. After our SIGINT,
    programs end as they like.
    """
    if event.task not in state.stopped:
        return False
    return state.interrupts or event.exit.code in (0, _TERM_STATUS) or event.exit.signal in _STOP_SIGNALS


def failed_by_itself(state: AttemptState, event: TaskExited) -> bool:
    """Whether the task failed on its own: it raised, or did not end as a stopped task does."""
    crash = event.crash
    if crash is None or crash.thread is not None or state.interrupts:
        return not was_stopped(state, event)
    obeyed = find_own_end(event).code == _TERM_STATUS and crash.exit_status is not None  # by its own SIGTERM handler
    return not (obeyed and was_stopped(state, event))


def failure_time(event: TaskExited) -> float:
    """When the task failed, in Unix seconds: the time of the exception, if the main thread raised one."""
    return event.crash.time if event.crash is not None and event.crash.thread is None else ended_time(event)


def is_collateral(event: TaskExited, tails: Mapping[TaskId, Sequence[str]]) -> bool:
    """Whether the failure only shows that a peer is gone."""
    crash = event.crash
    if crash is not None and crash.thread is None:
        return is_collateral_crash(crash)
    # No Python exception: TensorFlow aborted, or the program did not run in our interpreter.
    if event.exit.signal not in (None, signal.SIGABRT) or event.evidence is not None:
        return False
    return has_collateral_line(tails.get(event.task, ()))


def ended_before(state: AttemptState, failed: TaskExited) -> list[TaskExited]:
    """The training tasks that had succeeded before that failure."""
    ended = [event for event in state.exits.values() if not event.failed and event.task in state.policy.trainers]
    return [event for event in ended if ended_time(event) < failure_time(failed)]


def ended_time(event: TaskExited) -> float:
    """When the task's program ended; its interpreter ends later."""
    return event.time if event.finished is None else event.finished


def find_own_end(event: TaskExited) -> TaskExit:
    """How the program ended. A signal may have ended its interpreter only afterwards: usually, we have sent it."""
    status = event.crash.exit_status if event.crash is not None and event.crash.thread is None else None
    return event.exit if status is None or event.exit.signal not in _STOP_SIGNALS else TaskExit(status)


def classify(state: AttemptState, event: TaskExited, tail: Sequence[str]) -> Cause:
    """The class of a task's own failure, whatever happened to the others."""
    crash, evidence, end = event.crash, event.evidence, find_own_end(event)
    raised = crash is not None and crash.thread is None and crash.exit_status is None
    injected = find_injected(state, event)
    preempted = not raised and (
        state.has_saved(event) or end.code == _TERM_STATUS or end.signal == signal.SIGTERM or injected == "preempt"
    )
    explains = {
        "disk-full": not preempted,  # it may be a coincidence; a task that exits as preempted knows that it was
        "out-of-memory": not (raised or injected or end != event.exit),  # if so, the kernel did not end the program
    }
    if evidence is not None and explains.get(evidence.reference, True):
        return Cause(event, evidence.reference, evidence.message, evidence.hint)
    if preempted:
        return Cause(event, "preempted")
    if injected:
        return Cause(event, "task-killed" if event.exit.signal is not None else "task-failed")
    errors = [] if crash is None else [error for error in (crash, crash.first) if error is not None]
    texts = [f"{error.exception}: {error.message}" for error in errors] or list(tail)
    known = find_known(texts, state.ports.values())
    if known is not None:
        return Cause(event, known.reference, hint=known.hint)
    if raised:  # no matter what ended its interpreter afterwards, usually we did
        return Cause(event, "task-failed")
    if end.signal == signal.SIGKILL:
        hint = "the sender of SIGKILL is unknown; most often it is the kernel's OOM killer: see `dmesg` on that node"
        return Cause(event, "task-killed", hint=hint)
    return Cause(event, "task-killed" if end.signal is not None else "task-failed")
