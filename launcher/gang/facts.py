"""Filters the relevant events, and records them in the state of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from launcher.gang.divergence import note_digest, render_divergence
from launcher.gang.events import (
    EndAnnounced,
    Event,
    FilesAsked,
    Interrupted,
    LeaderWaits,
    NodeAttached,
    NodeBusy,
    NodeClaimed,
    NodeEmpty,
    NodeHeard,
    NodeInspected,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSignalled,
    NodeSynced,
    NodeUnheard,
    ProfileAsked,
    ProgramEnded,
    StacksAsked,
    StacksReceived,
    TaskExited,
    TaskHalted,
    TaskInterrupted,
    TaskListening,
    TaskReported,
    TaskStarted,
    TaskUnguarded,
    TaskWrote,
)
from launcher.gang.state import BEFORE_START, AttemptState, IndividualRestart, Phase
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import ModelDigest

REFUSALS = 1000
"""The most refusals of one node that are kept, including their problems; a broken node may send them without end."""

_Fact = TypeVar("_Fact")


def is_relevant(state: AttemptState, event: Event) -> bool:
    """Whether the event may matter; False for repetitions, and for events that only a broken agent can send."""
    match event:
        case NodeReady(node):
            return state.phase is Phase.CONNECTING and node in state.policy.nodes and node not in state.ready
        case NodeClaimed(node) | NodeBusy(node):
            return state.phase is Phase.CLAIMING and node in state.asked
        case NodeSynced(node):
            wanted = state.policy.restores if event.checkpoint else state.policy.syncs
            return state.phase is Phase.SYNCING and node in wanted
        case NodePrepared(node, ports):
            asked = state.phase is Phase.PREPARING and node in state.policy.nodes
            return asked and ports.keys() == state.policy.nodes[node] and node not in state.prepared
        case NodeInspected(node):
            return state.phase is Phase.PREPARING and state.policy.checks and node in state.policy.nodes
        case NodeRefused(node):
            kept = sum(1 + len(refusal.problems) for refusal in state.refusals if refusal.node == node)
            return node in state.policy.nodes and kept < REFUSALS
        case NodeLost(node):
            return node in state.policy.nodes and node not in state.empty and node not in state.lost
        case NodeAttached(node):
            return node in state.detached
        case NodeUnheard(node):
            return node in state.policy.nodes and node not in state.unheard and node not in state.lost
        case NodeHeard(node):
            return node in state.unheard
        case NodeEmpty(node):
            return node in state.policy.nodes and node not in state.empty and state.phase is Phase.STOPPING
        case TaskStarted(task):
            asked = state.phase not in BEFORE_START and len(state.prepared) == len(state.policy.nodes)
            known = state.started[task].start if task in state.started else _find_ended(state, task)
            return asked and task in state.policy.tasks and event.start > known
        case TaskUnguarded(task, why):
            return task in state.policy.tasks and state.unguarded.get(task) != why
        case TaskHalted(task) | TaskReported(task):
            return task in state.started and task not in state.exits and state.phase is not Phase.STOPPING
        case TaskListening(task):
            # A port that opens after the deadline does not change why the cluster was stopped.
            return task in state.started and task not in state.exits and state.phase is not Phase.STOPPING
        case ProgramEnded(task):
            is_running = task in state.started and task not in state.exits and task not in state.programs
            is_asked = state.phase is not Phase.STOPPING or state.interrupts
            return is_running and is_asked and event.start > _find_ended(state, task)
        case TaskInterrupted(task):
            is_running = task in state.started and task not in state.exits
            return is_running and state.interrupts and task not in state.interrupted
        case TaskExited(task):
            return task in state.started and task not in state.exits and event.start > _find_ended(state, task)
        case LeaderWaits():
            return state.phase is Phase.FORMING
        case TaskWrote(task):
            return task in state.started and task not in state.exits
        case NodeSignalled(node):
            return node in state.policy.nodes and node not in state.signalled
        case EndAnnounced():
            is_ours = not event.node or (event.node in state.policy.nodes and state.needs(event.node))
            return state.announced is None and is_ours
        case StacksReceived():
            return state.suspicion is not None
        case StacksAsked() | ProfileAsked() | FilesAsked():
            return False
    return True


def _find_ended(state: AttemptState, task: TaskId) -> int:
    """The number of the task's last start that has ended and was followed by another start; 0 if there is none."""
    ends = state.restarted.get(task, ())
    return ends[-1].exited.start if ends else 0


def apply(state: AttemptState, event: Event) -> AttemptState:
    """Returns the state with the facts that the event reports."""
    match event:
        case NodeReady(node):
            return replace(state, ready=state.ready | {node})
        case NodeClaimed(node, gpus):
            return replace(state, asked=state.asked - {node}, claimed={**state.claimed, node: gpus})
        case NodeBusy(node):
            return replace(state, asked=state.asked - {node}, lacking={**state.lacking, node: event})
        case NodeSynced(node) if event.checkpoint:
            return replace(state, restored=state.restored | {node})
        case NodeSynced(node):
            return replace(state, synced=state.synced | {node})
        case NodePrepared(node, ports, unguarded):
            return replace(
                state,
                prepared=state.prepared | {node},
                ports={**state.ports, **ports},
                unguarded={**state.unguarded, **unguarded},
            )
        case TaskUnguarded(task, why):
            return replace(state, unguarded={**state.unguarded, task: why})
        case NodeInspected(node):
            return replace(state, inspected=state.inspected | {node})
        case NodeRefused():
            return replace(state, refusals=(*state.refusals, event))
        case NodeLost(node, reason):
            return replace(
                state,
                lost={**state.lost, node: reason},
                detached=state.detached - {node},
                unheard=state.unheard - {node},
            )
        case NodeUnheard(node):
            return replace(state, unheard=state.unheard | {node})
        case NodeHeard(node):
            return replace(state, unheard=state.unheard - {node})
        case NodeAttached(node):
            return replace(state, detached=state.detached - {node})
        case NodeEmpty(node):
            return replace(state, empty={**state.empty, node: event})
        case Interrupted(signum):
            if state.phase is Phase.STOPPING:
                return state
            state = replace(state, interrupts=event.is_by_hand)
            return state if state.is_done else replace(state, signal=signum)
        case TaskInterrupted(task):
            return replace(state, interrupted=state.interrupted | {task})
        case NodeSignalled(node):
            return replace(state, signalled={**state.signalled, node: event})
        case EndAnnounced():
            return replace(state, announced=event) if event.reference else replace(state, signalled={})
        case TaskStarted(task):
            stopped = state.stopped | {task} if state.phase is Phase.STOPPING else state.stopped
            return replace(state, started={**state.started, task: event}, stopped=stopped)
        case TaskListening(task):
            return replace(state, listening={**state.listening, task: event})
        case LeaderWaits(tasks):
            return replace(state, not_joined=tasks)
        case TaskReported(task):
            state = replace(state, status={**state.status, task: event})
            return state if event.model is None else _compare_models(state, task, event.model)
        case StacksReceived(texts, activity):
            return replace(state, stacks=texts, activity=activity)
        case TaskHalted(task, signum):
            others = {name: halt for name, halt in state.halted.items() if name != task}
            return replace(state, halted=others if signum is None else {**others, task: event})
        case ProgramEnded(task):
            state = replace(state, programs={**state.programs, task: event})
            return _note_end(state, task, is_bad=event.crash is not None and task in state.policy.trainers)
        case TaskExited(task):
            # Its end has crossed the order to stop it.
            stopped = state.stopped - {task} if event.before_stop and not event.failed else state.stopped
            state = replace(state, exits={**state.exits, task: event}, stopped=stopped)
            is_bad = event.failed and task in state.policy.trainers
            state = _note_end(state, task, is_bad=is_bad or task in state.policy.servers)
            return _forget(state, event) if _restarts_individually(state, event) else state
    return state


def _note_end(state: AttemptState, task: TaskId, *, is_bad: bool) -> AttemptState:
    """The state with the end of the task or of its program; `is_bad`: it may fail the attempt."""
    is_first = task in state.policy.trainers and task not in state.ended
    return replace(
        state,
        ended=state.ended | {task} if is_first else state.ended,
        bad_ends=state.bad_ends | {task} if is_bad else state.bad_ends,
    )


def _restarts_individually(state: AttemptState, event: TaskExited) -> bool:
    return (
        state.phase is not Phase.STOPPING
        and state.fails(event)
        and event.task.type in state.policy.strategy.restarted_individually
        and event.start <= state.policy.max_individual_restarts
    )


def _forget(state: AttemptState, event: TaskExited) -> AttemptState:
    """Forgets that this task was ever started: it restarts while the others continue."""
    task = event.task

    def without(facts: Mapping[TaskId, _Fact]) -> dict[TaskId, _Fact]:
        return {other: fact for other, fact in facts.items() if other != task}

    ends = (*state.restarted.get(task, ()), IndividualRestart(event, state.status.get(task)))
    return replace(
        state,
        started=without(state.started),
        listening=without(state.listening),
        status=without(state.status),
        halted=without(state.halted),
        programs=without(state.programs),
        exits=without(state.exits),
        ended=state.ended - {task},
        bad_ends=state.bad_ends - {task},
        restarted={**state.restarted, task: ends},
    )


def _compare_models(state: AttemptState, task: TaskId, digest: ModelDigest) -> AttemptState:
    digests = note_digest(state.digests, task, digest)
    divergence = state.divergence or render_divergence(digests, task, state.policy.trainers)
    return replace(state, digests=digests, divergence=divergence)
