"""A takeover at any event of any history changes nothing: the next controller has the same facts and the same end."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.gang.events import (
    EndAnnounced,
    Event,
    Interrupted,
    NodeLost,
    NodeRefused,
    NodeSignalled,
    ProgramEnded,
    TaskExited,
    TaskHalted,
    TaskReported,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, Reason
from launcher.rundir.history import replay
from launcher.spec.strategies import RULES
from launcher.tasks import TaskId, parse_task_id
from launcher.verdict.causes import find_cause
from tests.harness.builders.facts import facts
from tests.sim.takeover_stories import Story, Takeover, World
from worker_entry.protocol.values import CrashRecord, Problem, Progress, TaskExit

W0, W1, CHIEF, PS, EVALUATOR, BOARD = (
    parse_task_id(text) for text in ("worker:0", "worker:1", "chief:0", "ps:0", "evaluator:0", "tensorboard:0")
)
CLUSTERS: tuple[tuple[Any, Mapping[str, tuple[TaskId, ...]]], ...] = (
    ("multi_worker_mirrored", {"a": (W0, W1)}),
    ("multi_worker_mirrored", {"a": (W0,), "b": (W1,)}),
    ("multi_worker_mirrored", {"a": (W0, BOARD), "b": (W1,), "c": (EVALUATOR,)}),
    ("parameter_server", {"a": (CHIEF, PS), "b": (W0, W1), "c": (EVALUATOR,)}),
)
OUT_OF_STEP = CrashRecord(1000.0, "InternalError", "Collective instance 7 expected group size 2, got 1")
RAISED = CrashRecord(1000.0, "ValueError", "no batch")
STEPS = Progress(9, 1, 9, 1000.0, 1009.0)


def is_possible(event: Event, policy: AttemptPolicy) -> bool:
    task, node = getattr(event, "task", None), getattr(event, "node", "")
    return (task is None or task in policy.tasks) and (not node or node in policy.nodes)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    strategy, layout = draw(st.sampled_from(CLUSTERS))
    nodes = {node: frozenset(tasks) for node, tasks in layout.items()}
    everyone = frozenset().union(*nodes.values())
    policy = AttemptPolicy(
        nodes,
        forming=frozenset(task for task in everyone if task not in (EVALUATOR, BOARD)),
        start_s=600.0,
        drain_s=draw(st.sampled_from([0.0, 3000.0])),
        stop_grace_s=10.0,
        strategy=RULES[strategy],
        max_individual_restarts=draw(st.integers(0, 2)),
        keeps_auxiliary=draw(st.booleans()),
    )
    reports = draw(st.booleans())
    tasks, names = st.sampled_from(sorted(everyone)), st.sampled_from(sorted(nodes))
    ends = st.sampled_from([TaskExit(0), TaskExit(1), TaskExit(42), TaskExit(None, signal.SIGKILL)])
    occurrences: st.SearchStrategy[Event] = st.one_of(
        st.builds(TaskExited, tasks, ends, st.just(1000.0)),
        st.builds(TaskExited, tasks, st.just(TaskExit(1)), st.just(1000.0), st.just(OUT_OF_STEP)),
        st.builds(TaskExited, tasks, st.just(TaskExit(0)), st.just(1000.0)),
        st.builds(ProgramEnded, tasks, st.just(1000.0), st.sampled_from([None, None, RAISED])),
        st.builds(TaskHalted, tasks, st.sampled_from([signal.SIGSTOP, None]), st.just(1000.0)),
        tasks.map(lambda task: TaskReported(task, "trains", 1000.0, saves_when_preempted=True)),
        tasks.map(lambda task: TaskReported(task, "trains", 1000.0, injected=("stop@step=5",))),
        *([tasks.map(lambda task: TaskReported(task, "trains", 1000.0, STEPS))] if reports else []),
        names.map(lambda node: NodeLost(node, "gone")),
        names.map(lambda node: NodeRefused(node, (Problem("broken", "no"),))),
        st.builds(NodeSignalled, names, st.just(1000.0)),
        st.sampled_from([signal.SIGINT, signal.SIGTERM]).map(Interrupted),
        st.sampled_from([EndAnnounced("preempted", "taken", (), 20.0), EndAnnounced("oom", "", (), stays=True)]),
    )
    waits = st.sampled_from([0.0, 20.0, 50.0])
    events = draw(st.lists(st.tuples(waits, occurrences), max_size=8))
    return Story(policy, tuple(events), reports, draw(st.sampled_from(["finish", "hang", "work"])))


takeovers = st.builds(
    Takeover,
    st.integers(0, 12),
    st.sampled_from([0, 0, 1, 2, 3]),
    st.sampled_from([0.0, -1e5, 1e5, 3600.0]),
)


def end_of(state: AttemptState) -> tuple[Reason | None, int | None, TaskId | None]:
    """Why the attempt ended, by which signal, and because of which task."""
    cause = find_cause(state, {}) if state.reason is Reason.TASK_FAILED else None
    return state.reason, state.signal, cause.exited.task if cause is not None else None


def check(story: Story, takeover: Takeover) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        alone = World(story, Path(other)).play()
        world = World(story, Path(folder))
        taken = world.play(takeover)
    if taken is None or world.took_over is None:
        return  # the takeover was impossible, or the attempt had ended before
    assert alone is not None
    assert end_of(taken) == end_of(alone)


def check_facts(story: Story, at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(story, Path(folder))
        seen: list[AttemptState] = []
        original = world._take_over

        def take_over(takeover: Takeover) -> bool:
            seen.append(world.state)
            return original(takeover)

        world._take_over = take_over  # type: ignore[method-assign]  # a look at the state at that moment
        world.play(Takeover(at))
        if not seen or world.took_over is None or world.took_over.state != "running":
            return
        [live] = seen
        assert facts(replay(world.took_over, story.policy)) == facts(live)


@given(stories(), takeovers)
@settings(max_examples=200, derandomize=True)
def test_a_takeover_at_any_event_leads_to_the_same_end(story: Story, takeover: Takeover) -> None:
    check(story, takeover)


@given(stories(), st.integers(0, 12))
@settings(max_examples=100, derandomize=True)
def test_the_next_controller_knows_what_the_last_one_knew(story: Story, at: int) -> None:
    check_facts(story, at)
