"""The rules by which a cluster lives and dies, as a pure function: `decide(state, event) → (state, actions)`.

MultiWorkerMirroredStrategy is all or nothing. Success is that every chief and worker ended with status 0; the first
one that does not decides, and all others are stopped. An evaluator watches: its end decides nothing.

With ParameterServerStrategy the chief decides. The others serve and never end; of them a worker that does is started
again alone. Which tasks are which is in the rules (`strategies`).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from launcher.gang.busy import RECHECK_S, find_busy, is_excused
from launcher.gang.events import (
    Action,
    AskStacks,
    Checked,
    CheckNodes,
    Event,
    Finish,
    Interrupted,
    LeaderWaits,
    NodeEmpty,
    NodeInspected,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSynced,
    PrepareNodes,
    StacksAsked,
    StacksTold,
    StartAgain,
    StartTasks,
    StopNodes,
    SyncNodes,
    TaskExited,
    TaskHalted,
    TaskListening,
    TaskStarted,
    TaskTold,
    TaskWrote,
)
from launcher.gang.out_of_step import is_out_of_step
from launcher.gang.stalls import is_progress, is_stalled
from launcher.gang.state import BEFORE_START, Gang, Phase, Reason, Return, Rules
from launcher.tasks import TaskId

FAILURE_GRACE_S = 1.0
"""From TERM to KILL after a failure: the others cannot go on, and TensorFlow does not heed TERM."""
SAVED_STATUS = 42
"""With this a worker ends whose PreemptionCheckpointHandler was asked to: all workers save, and end like that."""
STOP_MARGIN_S = 30.0
"""How long after the last KILL a node may take to say that it is empty."""
REFUSALS = 1000
"""Refusals of one node, and problems in them, that are kept; a broken one has no end of them."""
STACKS_S = 10.0
"""How long all tasks may take to say what they are doing, before they are stopped for doing nothing."""


_Fact = TypeVar("_Fact")

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
    if is_progress(gang, event):
        gang = replace(gang, moved=now, busy={}, excused=None)
    if gang.phase is Phase.STOPPING:
        return _while_stopping(gang, event, now)
    if isinstance(event, Interrupted):
        if gang.is_over and gang.rules.keeps_sides:  # only what was kept for the user is left
            return _stop(gang, Reason.SUCCEEDED, FAILURE_GRACE_S, now)
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
            said = sum(1 + len(refusal.problems) for refusal in gang.refusals if refusal.node == node)
            return node in gang.rules.nodes and said < REFUSALS
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
        case LeaderWaits():
            return gang.phase is Phase.FORMING
        case TaskWrote(task):
            return task in gang.started and task not in gang.exits
        case StacksTold():
            return gang.suspicion is not None
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
        case LeaderWaits(tasks):
            return replace(gang, unheard=tasks)
        case TaskTold(task):
            return replace(gang, told={**gang.told, task: event})
        case StacksTold(texts, activity):
            return replace(gang, stacks=texts, activity=activity)
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
    trainers = gang.rules.trainers
    trainer_ended = isinstance(event, TaskExited) and event.task in trainers
    ended = trainers & gang.exits.keys()
    failed = gang.broken
    asks = gang.suspicion is Reason.TASK_FAILED  # where all are, before they are stopped
    if isinstance(event, TaskExited) and gang.fails(event) and not asks:
        if _may_return(gang, event.task):
            return _start_again(gang, event)
        if is_out_of_step(event) and ended != trainers:
            return _suspect(replace(gang, suspicion=None), Reason.TASK_FAILED, event, now)
        if event.exit.code != SAVED_STATUS or not trainer_ended:
            return _stop(gang, Reason.TASK_FAILED, FAILURE_GRACE_S, now)
        # The others are still saving.
        gang = replace(gang, deadline=now + gang.rules.drain_s if gang.rules.drain_s else None)
    if failed:
        over = ended == trainers or (asks and isinstance(event, StacksTold)) or _is_due(gang, now)
        return _stop(gang, Reason.TASK_FAILED, FAILURE_GRACE_S, now) if over else (gang, ())
    drained = now + gang.rules.drain_s if gang.rules.drain_s else None
    if gang.phase is Phase.FORMING:
        # A trainer that has ended well needed no cluster, or had it: nobody waits for ports any more.
        if gang.started.keys() == gang.rules.tasks and (ended or gang.is_up):
            gang = replace(gang, phase=Phase.RUNNING, deadline=drained if ended else None, suspicion=None, moved=now)
        elif gang.suspicion is not None or _is_due(gang, now):
            return _suspect(gang, Reason.START_TIMEOUT, event, now)
    elif trainer_ended and (len(ended) == 1 or ended == trainers):
        gang = replace(gang, deadline=drained)
    if ended == trainers:
        # An evaluator may want to look at the last checkpoint; a task that has ended has nothing more to do.
        if gang.is_over and gang.rules.keeps_sides and gang.rules.sides - gang.exits.keys():
            return replace(gang, deadline=None), ()
        if gang.is_over or _is_due(gang, now):
            return _stop(gang, Reason.SUCCEEDED, FAILURE_GRACE_S, now)
    elif gang.phase is Phase.RUNNING:
        if is_stalled(gang, now):
            return _suspect(gang, Reason.STALLED, event, now)
        if ended and (gang.suspicion is Reason.DRAIN_TIMEOUT or _is_due(gang, now)):
            return _suspect(gang, Reason.DRAIN_TIMEOUT, event, now)
        if gang.suspicion is not None:  # it gets on
            gang = replace(gang, suspicion=None, deadline=gang.deadline if ended else None)
    return gang, ()


def _may_return(gang: Gang, task: TaskId) -> bool:
    return task.type in gang.rules.strategy.returns and len(gang.returned.get(task, ())) < gang.rules.max_returns


def _start_again(gang: Gang, event: TaskExited) -> Decision:
    """As if this one task had never been started."""
    task = event.task

    def without(facts: Mapping[TaskId, _Fact]) -> dict[TaskId, _Fact]:
        return {other: fact for other, fact in facts.items() if other != task}

    gang = replace(
        gang,
        started=without(gang.started),
        listening=without(gang.listening),
        told=without(gang.told),
        halted=without(gang.halted),
        exits=without(gang.exits),
        returned={**gang.returned, task: (*gang.returned.get(task, ()), Return(event, gang.told.get(task)))},
    )
    return gang, (StartAgain(task),)


def _suspect(gang: Gang, reason: Reason, event: Event, now: float) -> Decision:
    """Has the tasks say what they are doing before they are stopped for it; who is at work is left at it."""
    if gang.suspicion is None:
        stalled_s = now - gang.moved if gang.moved is not None else 0.0
        return replace(gang, suspicion=reason, stalled_s=stalled_s, deadline=now + STACKS_S), (AskStacks(),)
    if isinstance(event, StacksTold):
        busy = find_busy(gang)
        if is_excused(gang, reason, busy):
            waits_s = {Reason.START_TIMEOUT: gang.rules.start_s, Reason.DRAIN_TIMEOUT: gang.rules.drain_s}.get(reason)
            deadline = now + waits_s if waits_s is not None else None
            return replace(gang, suspicion=None, busy=busy, excused=now + RECHECK_S, deadline=deadline), ()
    if isinstance(event, StacksTold) or _is_due(gang, now):
        return _stop(gang, reason, FAILURE_GRACE_S, now)
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
