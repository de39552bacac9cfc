"""An event counts only when it can be true: a broken agent may send any message at any time, and repeat it."""

from __future__ import annotations

import signal

import pytest

from launcher.gang.events import (
    Event,
    Interrupted,
    LeaderWaits,
    NodeAttached,
    NodeEmpty,
    NodeHeard,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSignalled,
    NodeSynced,
    NodeUnheard,
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
from launcher.gang.facts import is_relevant
from launcher.tasks import TaskId
from tests.harness.builders.gang import (
    CTRL_C,
    TWO_NODES,
    W0,
    W1,
    exited,
    make_policy,
    play,
    preparing,
    running,
    started,
)
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import Problem, TaskExit

POLICY = replace(make_policy(TWO_NODES), syncs=frozenset("a"), restores=frozenset("b"))
READY: list[Event] = [NodeReady("a"), NodeReady("b")]
RUNNING = running(make_policy(TWO_NODES))
SYNCED: list[Event] = [*READY, NodeSynced("a", 1, 1), NodeSynced("b", 1, 1, checkpoint=True)]
UNKNOWN = TaskId("worker", 9)
TERM = Interrupted(signal.SIGTERM)
STAGES: dict[str, tuple[Event, ...]] = {
    "connecting": (),
    "syncing": (*READY,),
    "preparing": (*SYNCED,),
    "forming": (*SYNCED, *preparing(POLICY)[2:]),
    "starting": (*SYNCED, *preparing(POLICY)[2:], *started(W0, W1)),
    "running": (*SYNCED, *RUNNING[2:]),
    "stopping": (*SYNCED, *RUNNING[2:], TERM),
    "interrupted": (*SYNCED, *RUNNING[2:], CTRL_C),
}
"""The events until each stage of an attempt."""
LIVE = "starting running"
COUNTS: list[tuple[Event, str]] = [
    (NodeReady("a"), "connecting"),
    (NodeReady("c"), ""),
    (NodeSynced("a", 1, 1), "syncing"),
    (NodeSynced("b", 1, 1), ""),
    (NodeSynced("b", 1, 1, checkpoint=True), "syncing"),
    (NodeSynced("a", 1, 1, checkpoint=True), ""),
    (NodePrepared("a", {W0: 20000}), "preparing"),
    (NodePrepared("a", {W1: 20000}), ""),
    (NodePrepared("c", {W0: 20000}), ""),
    (NodeRefused("a", (Problem("x", "y"),)), " ".join(STAGES)),
    (NodeRefused("c", (Problem("x", "y"),)), ""),
    (NodeLost("a", "gone"), " ".join(STAGES)),
    (NodeLost("c", "gone"), ""),
    (NodeAttached("a"), ""),
    (NodeUnheard("a"), " ".join(STAGES)),
    (NodeUnheard("c"), ""),
    (NodeHeard("a"), ""),
    (NodeEmpty("a"), "stopping interrupted"),
    (NodeEmpty("c"), ""),
    (TaskStarted(W0, 7, 1000.0), "forming"),
    (TaskStarted(W0, 7, 1000.0, 2), "forming starting running stopping interrupted"),
    (TaskStarted(UNKNOWN, 7, 1000.0), ""),
    (TaskUnguarded(W0, "why"), " ".join(STAGES)),
    (TaskUnguarded(UNKNOWN, "why"), ""),
    (TaskHalted(W0, 19, 1000.0), LIVE),
    (TaskReported(W0, "trains", 1000.0), LIVE),
    (TaskReported(UNKNOWN, "trains", 1000.0), ""),
    (TaskListening(W0, 1000.0), LIVE),
    (TaskWrote(W0), f"{LIVE} stopping interrupted"),
    (ProgramEnded(W0, 1000.0), f"{LIVE} interrupted"),
    (ProgramEnded(UNKNOWN, 1000.0), ""),
    (ProgramEnded(W0, 1000.0, start=0), ""),
    (TaskInterrupted(W0), "interrupted"),
    (TaskInterrupted(UNKNOWN), ""),
    (TaskExited(W0, TaskExit(0), 1000.0), f"{LIVE} stopping interrupted"),
    (TaskExited(W0, TaskExit(0), 1000.0, start=0), ""),
    (LeaderWaits(frozenset()), "forming starting"),
    (NodeSignalled("a", 1000.0), " ".join(STAGES)),
    (NodeSignalled("c", 1000.0), ""),
    (StacksReceived({}, {}), ""),
    (StacksAsked(), ""),
]


@pytest.mark.parametrize(("event", "stages"), COUNTS, ids=lambda value: str(value)[:40])
def test_an_event_counts_only_in_the_stages_in_which_it_can_be_true(event: Event, stages: str) -> None:
    counts = [stage for stage, events in STAGES.items() if is_relevant(play(POLICY, *events)[0], event)]
    assert counts == [stage for stage in STAGES if stage in stages.split()]


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (NodeUnheard("a"), NodeUnheard("a")),
        (TaskUnguarded(W0, "why"), TaskUnguarded(W0, "why")),
        (NodeSignalled("a", 1000.0), NodeSignalled("a", 1001.0)),
        (ProgramEnded(W0, 1000.0), ProgramEnded(W0, 1001.0)),
        (exited(W0), exited(W0)),
        (exited(W0), ProgramEnded(W0, 1001.0)),
        (exited(W0), TaskReported(W0, "trains", 1000.0)),
        (exited(W0), TaskListening(W0, 1001.0)),
        (exited(W0), TaskWrote(W0)),
    ],
)
def test_an_event_does_not_count_again_or_after_the_end_of_its_task(before: Event, event: Event) -> None:
    assert is_relevant(play(POLICY, *STAGES["running"])[0], event)
    assert not is_relevant(play(POLICY, *STAGES["running"], before)[0], event)


def test_a_node_counts_as_heard_only_after_it_was_unheard() -> None:
    assert is_relevant(play(POLICY, *STAGES["running"], NodeUnheard("a"))[0], NodeHeard("a"))
    assert not is_relevant(play(POLICY, *STAGES["running"], NodeUnheard("a"))[0], NodeHeard("b"))


def test_only_the_first_interruption_of_a_task_counts() -> None:
    assert not is_relevant(play(POLICY, *STAGES["interrupted"], TaskInterrupted(W0))[0], TaskInterrupted(W0))
