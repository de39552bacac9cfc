"""The rules by which a cluster lives and dies, as a pure function: `decide(state, event) → (state, actions)`.

MultiWorkerMirroredStrategy is all or nothing. Success is that every chief and worker ended with status 0; the first
one that does not decides, and all others are stopped. An evaluator watches: its end decides nothing.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from launcher.events import (
    Action,
    Checked,
    CheckNodes,
    Event,
    Finish,
    Interrupted,
    NodeEmpty,
    NodeInspected,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSynced,
    PrepareNodes,
    StacksAsked,
    StartTasks,
    StopNodes,
    SyncNodes,
    TaskExited,
    TaskHalted,
    TaskListening,
    TaskStarted,
    TaskTold,
)
from launcher.tasks import TaskId

FAILURE_GRACE_S = 2.0
"""From TERM to KILL after a failure: the others cannot go on, and TensorFlow does not heed TERM."""
SAVED_STATUS = 42
"""With this a worker ends whose PreemptionCheckpointHandler was asked to: all workers save, and end like that."""
STOP_MARGIN_S = 30.0
"""How long after the last KILL a node may take to say that it is empty."""


class Phase(enum.Enum):
    CONNECTING = "connecting"
    SYNCING = "syncing"
    PREPARING = "preparing"
    CHECKING = "checking"
    FORMING = "forming"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


BEFORE_START = (Phase.CONNECTING, Phase.SYNCING, Phase.PREPARING, Phase.CHECKING)


class Reason(enum.Enum):
    """Why the attempt is being stopped, or has ended."""

    SUCCEEDED = "succeeded"
    TASK_FAILED = "task-failed"
    REFUSED = "refused"
    NODE_LOST = "node-lost"
    START_TIMEOUT = "start-timeout"
    DRAIN_TIMEOUT = "drain-timeout"
    INTERRUPTED = "interrupted"
    CHECKED = "checked"


@dataclass(frozen=True)
class Rules:
    """What a gang has to know of the plan. Durations in seconds; 0 is for ever."""

    nodes: Mapping[str, frozenset[TaskId]]
    forming: frozenset[TaskId]
    """The tasks that open a port when the cluster forms."""
    start_s: float
    drain_s: float
    stop_grace_s: float
    syncs: frozenset[str] = frozenset()
    """The nodes that the program's folder is sent to."""
    checks: bool = False
    """Whether the nodes are checked before the start."""
    only_checks: bool = False
    """Whether that is all: nothing is started, and a node that cannot be used does not keep the others from it."""

    @property
    def tasks(self) -> frozenset[TaskId]:
        return frozenset().union(*self.nodes.values())


@dataclass(frozen=True)
class Gang:
    """One attempt as far as it has come."""

    rules: Rules
    phase: Phase = Phase.CONNECTING
    ready: frozenset[str] = frozenset()
    ports: Mapping[TaskId, int] = field(default_factory=dict)
    synced: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()
    inspected: frozenset[str] = frozenset()
    started: Mapping[TaskId, TaskStarted] = field(default_factory=dict)
    listening: Mapping[TaskId, TaskListening] = field(default_factory=dict)
    told: Mapping[TaskId, TaskTold] = field(default_factory=dict)
    halted: Mapping[TaskId, TaskHalted] = field(default_factory=dict)
    """The tasks that a signal has stopped, and that did not go on before we stopped the attempt."""
    exits: Mapping[TaskId, TaskExited] = field(default_factory=dict)
    refusals: tuple[NodeRefused, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    empty: Mapping[str, NodeEmpty] = field(default_factory=dict)
    reason: Reason | None = None
    signal: int | None = None
    """The signal for which the attempt is stopped, if it is for one."""
    stopped: frozenset[TaskId] = frozenset()
    """The tasks that were running when we began to stop them, or were just being started."""
    deadline: float | None = None
    """When a Tick is due at the latest, on the controller's monotonic clock."""

    @property
    def awaited(self) -> frozenset[str]:
        """The nodes on which the start depends."""
        nodes = frozenset(self.rules.nodes)
        refused = {refusal.node for refusal in self.refusals}
        return nodes - self.lost.keys() - refused if self.rules.only_checks else nodes

    @property
    def silent(self) -> frozenset[str]:
        """The nodes that the start waits for: they have not answered what all were asked last."""
        waited = self.awaited - self.lost.keys()
        synced = self.synced | (waited - self.rules.syncs)
        inspected = self.inspected if self.rules.checks else waited
        steps = (waited - answered for answered in (self.ready, synced, self.prepared & inspected))
        return next(filter(None, steps), frozenset())

    @property
    def missing(self) -> list[TaskId]:
        """The tasks that still have to open their port before the cluster is up; once stopped, those that had to."""
        ended = self.exits.keys() - self.stopped
        return sorted(self.rules.forming - self.listening.keys() - ended)


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
    if gang.phase is Phase.FINISHED or not _can_be(gang, event):
        return gang, ()
    gang = _record(gang, event)
    if gang.phase is Phase.STOPPING:
        return _while_stopping(gang, event, now)
    if isinstance(event, Interrupted):
        return _stop(replace(gang, signal=event.signal), Reason.INTERRUPTED, gang.rules.stop_grace_s, now)
    if not gang.rules.only_checks:
        if isinstance(event, NodeRefused):
            return _stop(gang, Reason.REFUSED, FAILURE_GRACE_S, now)
        if isinstance(event, NodeLost) and gang.phase is not Phase.CONNECTING:
            return _stop(gang, Reason.NODE_LOST, FAILURE_GRACE_S, now)
    if gang.phase in BEFORE_START:
        return _before_start(gang, event, now)
    return _while_running(gang, event, now)


def _can_be(gang: Gang, event: Event) -> bool:
    """Whether the event can be news; a broken agent is not believed, and an echo changes nothing."""
    match event:
        case NodeReady(node):
            return gang.phase is Phase.CONNECTING and node in gang.rules.nodes and node not in gang.ready
        case NodeSynced(node):
            return gang.phase is Phase.SYNCING and node in gang.rules.syncs
        case NodePrepared(node, ports):
            asked = gang.phase is Phase.PREPARING
            return asked and ports.keys() == gang.rules.nodes.get(node, frozenset()) and node not in gang.prepared
        case NodeInspected(node):
            return gang.phase is Phase.PREPARING and gang.rules.checks and node in gang.rules.nodes
        case NodeRefused(node):
            return node in gang.rules.nodes
        case NodeLost(node):
            return node in gang.rules.nodes and node not in gang.empty and node not in gang.lost
        case NodeEmpty(node):
            return node in gang.rules.nodes and node not in gang.empty and gang.phase is Phase.STOPPING
        case TaskStarted(task):
            asked = gang.phase not in BEFORE_START and gang.prepared == gang.rules.nodes.keys()
            return asked and task in gang.rules.tasks and task not in gang.started
        case TaskHalted(task) | TaskTold(task):
            return task in gang.started and task not in gang.exits and gang.phase is not Phase.STOPPING
        case TaskListening(task):
            # A port that opens after its deadline does not change what the cluster was stopped for.
            return task in gang.started and task not in gang.exits and gang.phase is not Phase.STOPPING
        case TaskExited(task):
            return task in gang.started and task not in gang.exits
        case StacksAsked():
            return False
    return True


def _record(gang: Gang, event: Event) -> Gang:
    match event:
        case NodeReady(node):
            return replace(gang, ready=gang.ready | {node})
        case NodeSynced(node):
            return replace(gang, synced=gang.synced | {node})
        case NodePrepared(node, ports):
            return replace(gang, prepared=gang.prepared | {node}, ports={**gang.ports, **ports})
        case NodeInspected(node):
            return replace(gang, inspected=gang.inspected | {node})
        case NodeRefused():
            return replace(gang, refusals=(*gang.refusals, event))
        case NodeLost(node, reason):
            return replace(gang, lost={**gang.lost, node: reason})
        case NodeEmpty(node):
            return replace(gang, empty={**gang.empty, node: event})
        case TaskStarted(task):
            stopped = gang.stopped | {task} if gang.phase is Phase.STOPPING else gang.stopped
            return replace(gang, started={**gang.started, task: event}, stopped=stopped)
        case TaskListening(task):
            return replace(gang, listening={**gang.listening, task: event})
        case TaskTold(task):
            return replace(gang, told={**gang.told, task: event})
        case TaskHalted(task, signum):
            others = {name: halt for name, halt in gang.halted.items() if name != task}
            return replace(gang, halted=others if signum is None else {**others, task: event})
        case TaskExited(task):
            return replace(gang, exits={**gang.exits, task: event})
    return gang


def _before_start(gang: Gang, event: Event, now: float) -> Decision:
    if gang.phase is Phase.CONNECTING and gang.rules.nodes.keys() <= gang.ready | gang.lost.keys() | _refused(gang):
        # All that stands in the way is told at once.
        if gang.lost and not gang.rules.only_checks:
            return _stop(gang, Reason.NODE_LOST, FAILURE_GRACE_S, now)
        if not gang.awaited:
            return _stop(gang, Reason.CHECKED, 0.0, now)
        if gang.rules.syncs & gang.awaited:
            return replace(gang, phase=Phase.SYNCING), (SyncNodes(),)
        return replace(gang, phase=Phase.PREPARING), (PrepareNodes(),)
    if gang.phase is Phase.SYNCING and gang.rules.syncs & gang.awaited <= gang.synced:
        return replace(gang, phase=Phase.PREPARING), (PrepareNodes(),)
    if gang.phase is Phase.PREPARING and not gang.silent:
        if gang.rules.checks:
            return replace(gang, phase=Phase.CHECKING), (CheckNodes(),)
        return replace(gang, phase=Phase.FORMING), (StartTasks(gang.ports),)
    if gang.phase is Phase.CHECKING and isinstance(event, Checked):
        if gang.rules.only_checks:
            return _stop(gang, Reason.CHECKED, 0.0, now)
        return replace(gang, phase=Phase.FORMING), (StartTasks(gang.ports),)
    if _is_due(gang, now):
        return _stop(gang, Reason.START_TIMEOUT, FAILURE_GRACE_S, now)
    return gang, ()


def _refused(gang: Gang) -> frozenset[str]:
    return frozenset(refusal.node for refusal in gang.refusals)


def _while_running(gang: Gang, event: Event, now: float) -> Decision:
    trainer_ended = isinstance(event, TaskExited) and event.task.trains
    trainers = {task for task in gang.rules.tasks if task.trains}
    ended = trainers & gang.exits.keys()
    failed = any(gang.exits[task].failed for task in ended)
    if isinstance(event, TaskExited) and trainer_ended and event.failed:
        if event.exit.code != SAVED_STATUS:
            return _stop(gang, Reason.TASK_FAILED, FAILURE_GRACE_S, now)
        # The others are still saving.
        gang = replace(gang, deadline=now + gang.rules.drain_s if gang.rules.drain_s else None)
    if failed:
        over = ended == trainers or _is_due(gang, now)
        return _stop(gang, Reason.TASK_FAILED, FAILURE_GRACE_S, now) if over else (gang, ())
    drained = now + gang.rules.drain_s if gang.rules.drain_s else None
    if gang.phase is Phase.FORMING:
        # A trainer that has ended well needed no cluster, or had it: nobody waits for ports any more.
        if gang.started.keys() == gang.rules.tasks and (ended or not gang.missing):
            gang = replace(gang, phase=Phase.RUNNING, deadline=drained if ended else None)
        elif _is_due(gang, now):
            return _stop(gang, Reason.START_TIMEOUT, FAILURE_GRACE_S, now)
    elif trainer_ended and (len(ended) == 1 or ended == trainers):
        gang = replace(gang, deadline=drained)
    if ended == trainers:
        # An evaluator may want to look at the last checkpoint; a task that has ended has nothing more to do.
        if gang.exits.keys() == gang.rules.tasks or _is_due(gang, now):
            return _stop(gang, Reason.SUCCEEDED, FAILURE_GRACE_S, now)
    elif gang.phase is Phase.RUNNING and _is_due(gang, now):
        return _stop(gang, Reason.DRAIN_TIMEOUT, FAILURE_GRACE_S, now)
    return gang, ()


def _while_stopping(gang: Gang, event: Event, now: float) -> Decision:
    # Ctrl-C insists. TERM and HUP may come more than once without anybody's impatience (`timeout`, a closed window),
    # and PIPE follows when Ctrl-C ended the reader of our output as well.
    if isinstance(event, Interrupted) and event.signal == signal.SIGINT:
        assert gang.deadline is not None
        return replace(gang, deadline=min(gang.deadline, now + STOP_MARGIN_S)), (StopNodes(0.0),)
    # Where no agent has answered nothing was started; what comes of its link is for the link to know.
    silent = gang.ready - gang.empty.keys() - gang.lost.keys()
    if silent and _is_due(gang, now):
        reasons = dict.fromkeys(silent, "did not say that all of its processes ended")
        gang, silent = replace(gang, lost={**gang.lost, **reasons}), frozenset()
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
    if gang.ready <= gang.lost.keys() | gang.empty.keys():
        return replace(gang, phase=Phase.FINISHED, deadline=None), (Finish(),)
    return gang, (StopNodes(grace_s),)


def _is_due(gang: Gang, now: float) -> bool:
    return gang.deadline is not None and now >= gang.deadline
