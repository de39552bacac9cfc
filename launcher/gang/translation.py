"""Turns an agent's message into an event."""

from __future__ import annotations

from launcher.gang.events import (
    Event,
    NodeBusy,
    NodeClaimed,
    NodeEmpty,
    NodeInspected,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSignalled,
    NodeSynced,
    ProgramEnded,
    TaskExited,
    TaskHalted,
    TaskInterrupted,
    TaskListening,
    TaskReported,
    TaskStarted,
    TaskUnguarded,
)
from launcher.tasks import parse_task_id
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.gpus import GpusClaimed
from worker_entry.protocol.messages import (
    Broken,
    Empty,
    Exited,
    Halted,
    Inspected,
    InterruptTaken,
    Listening,
    Message,
    Prepared,
    Ready,
    Refused,
    Returned,
    Signalled,
    Started,
    Status,
    Synced,
)
from worker_entry.protocol.strangers import Unguarded
from worker_entry.protocol.values import CrashRecord, Problem


def from_message(node: str, message: Message, clock_offset_s: float = 0.0) -> Event | None:
    """The event for a node's message; None if the message does not matter to the gang.

    Times are converted to the controller's clock; `clock_offset_s` is how far the node's clock is ahead of it.

    Raises:
        ValueError: the message names an impossible task.
    """
    match message:
        case Ready():
            return NodeReady(node)
        case GpusClaimed(_, gpus, busy, problem):
            if problem:
                why = f"cannot tell which GPUs are free: {problem}"
                return NodeRefused(node, (Problem("gpus-unknown", why, "run without --wait-gpus"),))
            return NodeBusy(node, tuple(busy)) if busy else NodeClaimed(node, tuple(gpus))
        case Synced(_, files, fetched, checkpoint, newer):
            return NodeSynced(node, files, fetched, checkpoint, newer)
        case Prepared(_, ports, unguarded):
            return NodePrepared(
                node,
                {parse_task_id(task): port for task, port in ports.items()},
                {parse_task_id(task): why for task, why in unguarded.items()},
            )
        case Inspected():
            return NodeInspected(node)
        case Refused(problems):
            return NodeRefused(node, tuple(problems))
        case Broken(problem):
            return NodeRefused(node, (problem,))
        case Signalled(time):
            return NodeSignalled(node, time - clock_offset_s)
        case Started(task, pid, time, start):
            return TaskStarted(parse_task_id(task), pid, time - clock_offset_s, start)
        case Listening(task, time):
            return TaskListening(parse_task_id(task), time - clock_offset_s)
        case Unguarded(task, why):
            return TaskUnguarded(parse_task_id(task), why)
        case Status(task, status):
            progress = status.progress
            if progress is not None:
                began, at = progress.began - clock_offset_s, progress.time - clock_offset_s
                progress = replace(progress, began=began, time=at, epoch_ends=[])  # they change no decision
            since = status.since - clock_offset_s
            return TaskReported(
                parse_task_id(task),
                status.phase,
                since,
                progress,
                injected=tuple(status.injected),
                strategy=status.strategy,
                own_tf_config=status.own_tf_config,
                own_tf_config_kept=status.own_tf_config_kept,
                own_resolver=status.own_resolver,
                keras=status.keras,
                model=status.model,
                saves_when_preempted=status.saves_when_preempted,
            )
        case Halted(task, signum, time):
            return TaskHalted(parse_task_id(task), signum or None, time - clock_offset_s)
        case InterruptTaken(task):
            return TaskInterrupted(parse_task_id(task))
        case Returned(task, time, crash, start):
            return ProgramEnded(parse_task_id(task), time - clock_offset_s, _shift(crash, clock_offset_s), start)
        case Exited(task, how, time, crash, finished, evidence, start):
            crash = _shift(crash, clock_offset_s)
            if finished is not None:
                finished -= clock_offset_s
            return TaskExited(parse_task_id(task), how, time - clock_offset_s, crash, finished, evidence, start)
        case Empty(_, left_behind, killed):
            return NodeEmpty(node, left_behind, killed)
    return None


def _shift(crash: CrashRecord | None, clock_offset_s: float) -> CrashRecord | None:
    return None if crash is None else replace(crash, time=crash.time - clock_offset_s)
