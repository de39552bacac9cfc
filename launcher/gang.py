"""The rules by which a cluster lives and dies, as a pure function: `decide(state, event) → (state, actions)`.

MultiWorkerMirroredStrategy is all or nothing. Success is that every chief and worker ended with status 0; the first
one that does not decides, and all others are stopped. An evaluator watches: its end decides nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.events import (
    Action,
    Event,
    Finish,
    Interrupted,
    NodeEmpty,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    PrepareNodes,
    StartTasks,
    StopNodes,
    TaskExited,
    TaskListening,
    TaskStarted,
)
from launcher.tasks import TaskId

FAILURE_GRACE_S = 2.0
"""From TERM to KILL after a failure: the others cannot go on, and TensorFlow does not heed TERM."""
STOP_MARGIN_S = 30.0
"""How long after the last KILL a node may take to say that it is empty."""


class Phase(enum.Enum):
    PREPARING = "preparing"
    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


class Reason(enum.Enum):
    """Why the attempt is being stopped, or has ended."""

    SUCCEEDED = "succeeded"
    TASK_FAILED = "task-failed"
    REFUSED = "refused"
    NODE_LOST = "node-lost"
    START_TIMEOUT = "start-timeout"
    DRAIN_TIMEOUT = "drain-timeout"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Rules:
    """What a gang has to know of the plan. Durations in seconds; 0 is for ever."""

    nodes: Mapping[str, frozenset[TaskId]]
    forming: frozenset[TaskId]
    """The tasks that open a port when the cluster forms."""
    start_s: float
    drain_s: float
    stop_grace_s: float

    @property
    def tasks(self) -> frozenset[TaskId]:
        return frozenset().union(*self.nodes.values())


@dataclass(frozen=True)
class Gang:
    """One attempt as far as it has come."""

    rules: Rules
    phase: Phase = Phase.PREPARING
    ready: frozenset[str] = frozenset()
    ports: Mapping[TaskId, int] = field(default_factory=dict)
    prepared: frozenset[str] = frozenset()
    started: Mapping[TaskId, TaskStarted] = field(default_factory=dict)
    listening: Mapping[TaskId, TaskListening] = field(default_factory=dict)
    exits: Mapping[TaskId, TaskExited] = field(default_factory=dict)
    refusals: tuple[NodeRefused, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    empty: Mapping[str, NodeEmpty] = field(default_factory=dict)
    reason: Reason | None = None
    signal: int | None = None
    """The signal that interrupted the run, if one did."""
    stopped: frozenset[TaskId] = frozenset()
    """The tasks that were running when we began to stop them."""
    deadline: float | None = None
    """When a Tick is due at the latest, on the controller's monotonic clock."""

    @property
    def missing(self) -> list[TaskId]:
        """The tasks that still have to open their port before the cluster is up."""
        return sorted(self.rules.forming - self.listening.keys() - self.exits.keys())


Decision = tuple[Gang, tuple[Action, ...]]


def new_gang(rules: Rules, now: float) -> Gang:
    """An attempt that begins now."""
    return Gang(rules, deadline=now + rules.start_s if rules.start_s else None)


def decide(gang: Gang, event: Event, now: float) -> Decision:
    """What an event changes, and what is to be done about it.

    Args:
        gang: the state so far.
        event: what has happened.
        now: the controller's monotonic clock, in seconds.
    """
    gang = _record(gang, event)
    if gang.phase is Phase.FINISHED:
        return gang, ()
    if gang.phase is Phase.STOPPING:
        return _while_stopping(gang, event, now)
    if isinstance(event, Interrupted):
        return _stop(replace(gang, signal=event.signal), Reason.INTERRUPTED, gang.rules.stop_grace_s, now)
    if isinstance(event, NodeRefused):
        return _stop(gang, Reason.REFUSED, FAILURE_GRACE_S, now)
    if isinstance(event, NodeLost):
        return _stop(gang, Reason.NODE_LOST, FAILURE_GRACE_S, now)
    if gang.phase is Phase.PREPARING:
        return _while_preparing(gang, event, now)
    return _while_running(gang, event, now)


def _record(gang: Gang, event: Event) -> Gang:
    match event:
        case NodeReady(node):
            return replace(gang, ready=gang.ready | {node})
        case NodePrepared(node, ports):
            return replace(gang, prepared=gang.prepared | {node}, ports={**gang.ports, **ports})
        case NodeRefused():
            return replace(gang, refusals=(*gang.refusals, event))
        case NodeLost(node, reason) if node not in gang.empty:
            return replace(gang, lost={**gang.lost, node: reason})
        case NodeEmpty(node):
            return replace(gang, empty={**gang.empty, node: event})
        case TaskStarted(task):
            return replace(gang, started={**gang.started, task: event})
        case TaskListening(task):
            return replace(gang, listening={**gang.listening, task: event})
        case TaskExited(task):
            return replace(gang, exits={**gang.exits, task: event})
    return gang


def _while_preparing(gang: Gang, event: Event, now: float) -> Decision:
    nodes = gang.rules.nodes.keys()
    if _is_due(gang, now):
        return _stop(gang, Reason.START_TIMEOUT, FAILURE_GRACE_S, now)
    if isinstance(event, NodeReady) and gang.ready == nodes:
        return gang, (PrepareNodes(),)
    if isinstance(event, NodePrepared) and gang.prepared == nodes:
        return replace(gang, phase=Phase.FORMING), (StartTasks(gang.ports),)
    return gang, ()


def _while_running(gang: Gang, event: Event, now: float) -> Decision:
    if isinstance(event, TaskExited) and event.task.trains and not event.exit.ok:
        return _stop(gang, Reason.TASK_FAILED, FAILURE_GRACE_S, now)
    if gang.phase is Phase.FORMING:
        if _is_due(gang, now):
            return _stop(gang, Reason.START_TIMEOUT, FAILURE_GRACE_S, now)
        if gang.started.keys() == gang.rules.tasks and not gang.missing:
            gang = replace(gang, phase=Phase.RUNNING, deadline=None)
    trainers = {task for task in gang.rules.tasks if task.trains}
    if trainers <= gang.exits.keys():
        # An evaluator may want to look at the last checkpoint; a task that has ended has nothing more to do.
        if gang.exits.keys() == gang.rules.tasks or _is_due(gang, now):
            return _stop(gang, Reason.SUCCEEDED, FAILURE_GRACE_S, now)
    elif gang.phase is Phase.RUNNING and _is_due(gang, now):
        return _stop(gang, Reason.DRAIN_TIMEOUT, FAILURE_GRACE_S, now)
    if isinstance(event, TaskExited) and event.task.trains and gang.rules.drain_s and gang.phase is Phase.RUNNING:
        first = not any(task != event.task for task in gang.exits if task.trains)
        if first or trainers <= gang.exits.keys():
            gang = replace(gang, deadline=now + gang.rules.drain_s)
    return gang, ()


def _while_stopping(gang: Gang, event: Event, now: float) -> Decision:
    if isinstance(event, Interrupted):  # once asks, twice insists
        signal = gang.signal if gang.signal is not None else event.signal
        return replace(gang, signal=signal, deadline=now + STOP_MARGIN_S), (StopNodes(0.0),)
    silent = gang.rules.nodes.keys() - gang.empty.keys() - gang.lost.keys()
    if silent and _is_due(gang, now):
        reasons = dict.fromkeys(silent, "did not say that all of its processes ended")
        gang, silent = replace(gang, lost={**gang.lost, **reasons}), set()
    if not silent:
        return replace(gang, phase=Phase.FINISHED, deadline=None), (Finish(),)
    return gang, ()


def _stop(gang: Gang, reason: Reason, grace_s: float, now: float) -> Decision:
    gang = replace(
        gang,
        phase=Phase.STOPPING,
        reason=reason,
        stopped=frozenset(gang.started.keys() - gang.exits.keys()),
        deadline=now + grace_s + STOP_MARGIN_S,
    )
    if gang.rules.nodes.keys() <= gang.lost.keys() | gang.empty.keys():
        return replace(gang, phase=Phase.FINISHED, deadline=None), (Finish(),)
    return gang, (StopNodes(grace_s),)


def _is_due(gang: Gang, now: float) -> bool:
    return gang.deadline is not None and now >= gang.deadline
