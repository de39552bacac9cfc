"""Policies of small clusters, and histories of events for `decide`."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping

from hypothesis import strategies as st

from launcher.gang.decide import FAILURE_GRACE_S, decide, new_attempt
from launcher.gang.events import (
    Action,
    EndAnnounced,
    Event,
    Interrupted,
    LeaderWaits,
    NodeEmpty,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSignalled,
    StacksReceived,
    StopNodes,
    TaskExited,
    TaskListening,
    TaskReported,
    TaskStarted,
    TaskWrote,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState
from launcher.tasks import TaskId, parse_task_id
from worker_entry.protocol.values import Problem, Progress, TaskExit

W0, W1, W2, EVALUATOR = (parse_task_id(text) for text in ("worker:0", "worker:1", "worker:2", "evaluator:0"))
START_S, DRAIN_S, GRACE_S = 600.0, 300.0, 10.0
FAILURE_STOP = StopNodes(FAILURE_GRACE_S)
REFUSED = NodeRefused("b", (Problem("no-program", "there is no program /x"),))
CTRL_C = Interrupted(signal.SIGINT)


def make_policy(
    nodes: Mapping[str, Iterable[TaskId]],
    *,
    start_s: float = START_S,
    drain_s: float = DRAIN_S,
    stop_grace_s: float = GRACE_S,
) -> AttemptPolicy:
    tasks = {node: frozenset(of_node) for node, of_node in nodes.items()}
    everyone = frozenset().union(*tasks.values())
    forming = frozenset(task for task in everyone if task.trains) if len(everyone) > 1 else frozenset[TaskId]()
    return AttemptPolicy(tasks, forming, start_s=start_s, drain_s=drain_s, stop_grace_s=stop_grace_s)


ALL_HEARD = LeaderWaits(frozenset())
ONE_NODE = {"a": [W0, W1]}
TWO_NODES = {"a": [W0], "b": [W1]}
WITH_EVALUATOR = {"a": [W0, W1, EVALUATOR]}


def ports_of(policy: AttemptPolicy, node: str) -> dict[TaskId, int]:
    return {task: 20000 + task.index + 100 * (task.type == "evaluator") for task in policy.nodes[node]}


def started(*tasks: TaskId) -> list[Event]:
    return [TaskStarted(task, 100 + task.index, 1000.0) for task in tasks]


def listening(*tasks: TaskId) -> list[Event]:
    return [TaskListening(task, 1001.0) for task in tasks]


def exited(task: TaskId, code: int | None = 0, *, signal: int | None = None) -> TaskExited:
    return TaskExited(task, TaskExit(code if signal is None else None, signal), 1010.0)


def preparing(policy: AttemptPolicy) -> list[Event]:
    ready: list[Event] = [NodeReady(node) for node in policy.nodes]
    return [*ready, *(NodePrepared(node, ports_of(policy, node)) for node in policy.nodes)]


def running(policy: AttemptPolicy) -> list[Event]:
    """The events until the cluster is up."""
    return [*preparing(policy), *started(*sorted(policy.tasks)), *listening(*sorted(policy.forming)), ALL_HEARD]


def play(policy: AttemptPolicy, *events: Event | float) -> tuple[AttemptState, list[Action]]:
    """Plays the events to a new attempt, one after the other; a number sets the clock."""
    return play_on(new_attempt(policy, 0.0), *events)


def play_on(state: AttemptState, *events: Event | float) -> tuple[AttemptState, list[Action]]:
    now, performed = 0.0, list[Action]()
    for event in events:
        if isinstance(event, float):
            now = event
            continue
        state, actions = decide(state, event, now)
        performed += actions
    return state, performed


# --- properties of every history ---------------------------------------------------------------------------


NAMES = ("a", "b", "unknown")
TASKS = (W0, W1, EVALUATOR, TaskId("worker", 9))
LAYOUTS = ({"a": [W0]}, ONE_NODE, TWO_NODES, WITH_EVALUATOR, {"a": [W0, EVALUATOR], "b": [W1]})
nodes = st.sampled_from(NAMES)
tasks = st.sampled_from(TASKS)
exits = st.one_of(
    st.sampled_from([0, 0, 1, 143]).map(TaskExit), st.sampled_from([9, 15]).map(lambda n: TaskExit(None, n))
)
timeouts = st.sampled_from([0.0, 1.0, 600.0])
layouts = st.builds(
    lambda layout, start, drain, grace: make_policy(layout, start_s=start, drain_s=drain, stop_grace_s=grace),
    st.sampled_from(LAYOUTS),
    timeouts,
    timeouts,
    timeouts,
)
times = st.floats(1000, 1100)
progresses = st.one_of(st.none(), st.builds(Progress, st.integers(0, 9), st.integers(0, 1), st.just(1), times, times))
anything: st.SearchStrategy[Event] = st.one_of(
    nodes.map(NodeReady),
    st.builds(NodePrepared, nodes, st.dictionaries(tasks, st.integers(1, 65535), max_size=3)),
    st.builds(NodeRefused, nodes, st.sampled_from([(), REFUSED.problems])),
    st.builds(NodeLost, nodes, st.just("gone")),
    st.builds(NodeEmpty, nodes, st.integers(0, 2)),
    st.builds(TaskStarted, tasks, st.just(1), st.just(1000.0)),
    st.builds(TaskListening, tasks, st.just(1001.0)),
    st.builds(TaskExited, tasks, exits, st.floats(1000, 1100)),
    st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE]).map(Interrupted),
    st.builds(NodeSignalled, nodes, st.just(1000.0)),
    st.builds(
        EndAnnounced,
        st.sampled_from(["", "preempted", "interrupted", "out-of-memory"]),
        st.just("the nodes are taken away"),
        grace_s=st.sampled_from([0.0, 20.0, 2000.0]),
        stays=st.booleans(),
    ),
    st.builds(TaskReported, tasks, st.just("is training"), st.just(1001.0), progresses),
    st.builds(StacksReceived, st.just({})),
    tasks.map(TaskWrote),
    st.just(Tick()),
)


@st.composite
def histories(draw: st.DrawFn) -> tuple[AttemptPolicy, list[tuple[float, Event]]]:
    """A policy, and timed events: a plausible beginning of any length, then arbitrary events."""
    policy = draw(layouts)
    sensible = running(policy)
    events = [*sensible[: draw(st.integers(0, len(sensible)))], *draw(st.lists(anything, max_size=25))]
    now, history = 0.0, []
    for event in events:
        now += draw(st.sampled_from([0.0, 0.0, 0.5, 50.0]))
        history.append((now, event))
    return policy, history


def replay(
    policy: AttemptPolicy, history: Iterable[tuple[float, Event]]
) -> list[tuple[AttemptState, Action | None, AttemptState]]:
    """Every action, or None for an event without actions, with the states before and after the event."""
    state, steps = new_attempt(policy, 0.0), list[tuple[AttemptState, Action | None, AttemptState]]()
    for now, event in history:
        before = state
        state, actions = decide(state, event, now)
        steps += [(before, action, state) for action in actions or (None,)]
    return steps


def actions_of(steps: Iterable[tuple[AttemptState, Action | None, AttemptState]]) -> list[Action]:
    return [action for _, action, _ in steps if action is not None]
