"""While the connection to a node is broken, nothing that its tasks do is missing: it may have happened."""

from __future__ import annotations

from launcher.gang.decide import NEWS_S, SAVING_S, STACKS_S, take_over
from launcher.gang.events import (
    Action,
    AskStacks,
    Event,
    NodeAttached,
    NodeHeard,
    NodeLost,
    NodeUnheard,
    RestartTask,
    StacksReceived,
    StopNodes,
    TaskReported,
    TaskStarted,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.spec.strategies import RULES
from launcher.tasks import parse_task_id
from tests.harness.builders.gang import DRAIN_S, TWO_NODES, W0, W1, exited, make_policy, play, play_on, running
from worker_entry.protocol.frozen import replace

STALL_S = 60.0
POLICY = replace(make_policy(TWO_NODES), stall_s=STALL_S)
CHIEF, PS = parse_task_id("chief:0"), parse_task_id("ps:0")
SERVED = AttemptPolicy(
    {"a": frozenset({CHIEF}), "b": frozenset({W0}), "c": frozenset({PS})},
    forming=frozenset({CHIEF, W0, PS}),
    start_s=600.0,
    drain_s=DRAIN_S,
    stop_grace_s=10.0,
    strategy=RULES["parameter_server"],
)


def end_of(policy: AttemptPolicy, *events: Event | float) -> AttemptState:
    return play(policy, 10.0, *running(policy), *events)[0]


def test_a_cluster_is_not_stalled_while_a_needed_node_is_not_heard() -> None:
    state, actions = play(POLICY, 10.0, *running(POLICY), NodeUnheard("b"), 500.0, Tick(), 5000.0, Tick())
    assert state.phase is Phase.RUNNING
    assert AskStacks() not in actions


def test_the_limit_of_a_stall_begins_again_when_the_node_is_heard() -> None:
    heard: tuple[Event | float, ...] = (NodeUnheard("b"), 500.0, NodeHeard("b"))
    assert end_of(POLICY, *heard, 500.0 + STALL_S - 1, Tick()).suspicion is None
    assert end_of(POLICY, *heard, 500.0 + STALL_S, Tick()).suspicion is Reason.STALLED


def test_an_unanswered_question_does_not_stop_a_cluster_with_a_node_that_is_not_heard() -> None:
    asked: tuple[Event | float, ...] = (10.0 + STALL_S, Tick(), NodeUnheard("b"))
    for answer in (StacksReceived({}), Tick()):
        state = end_of(POLICY, *asked, 10.0 + STALL_S + STACKS_S, answer)
        assert (state.phase, state.suspicion) == (Phase.RUNNING, None)


def test_the_drain_limit_waits_for_a_task_whose_node_is_not_heard() -> None:
    drains: tuple[Event | float, ...] = (exited(W0), NodeUnheard("b"), 10.0 + DRAIN_S, Tick())
    assert end_of(POLICY, *drains).suspicion is None
    heard: tuple[Event | float, ...] = (*drains, 400.0, NodeHeard("b"), 400.0 + STACKS_S - 1, Tick())
    assert end_of(POLICY, *heard).suspicion is None
    assert end_of(POLICY, *heard, exited(W1)).reason is Reason.SUCCEEDED
    assert end_of(POLICY, *heard, 400.0 + STACKS_S, Tick()).suspicion is Reason.DRAIN_TIMEOUT


def test_a_lost_node_is_no_failure_if_the_others_then_report_that_they_have_finished() -> None:
    outage: tuple[Event | float, ...] = (*map(NodeUnheard, "abc"), 50.0, NodeHeard("a"), NodeLost("b", "gone"))
    assert end_of(SERVED, *outage, exited(CHIEF)).reason is Reason.SUCCEEDED
    late = end_of(SERVED, *outage, NodeHeard("c"), 50.0 + NEWS_S, Tick(), exited(CHIEF))
    assert late.reason is Reason.NODE_LOST


def test_a_node_that_is_gone_at_a_takeover_is_no_failure_if_the_others_then_report_that_they_have_finished() -> None:
    state, _ = play(SERVED, 10.0, *running(SERVED))
    left = replace(take_over(state), deadline=None)
    events: tuple[Event | float, ...] = (20.0, NodeAttached("a"), NodeLost("b", "gone"), NodeAttached("c"))
    assert play_on(left, *events, exited(CHIEF))[0].reason is Reason.SUCCEEDED
    assert play_on(left, *events, 20.0 + NEWS_S, Tick())[0].reason is Reason.NODE_LOST


def taken_over(*events: Event | float, policy: AttemptPolicy = POLICY) -> tuple[AttemptState, list[Action]]:
    """An attempt after these events, and after the next controller has attached its nodes at 1,000 s."""
    left = take_over(end_of(policy, *events))
    return play_on(left, 1000.0, *map(NodeAttached, policy.nodes))


def test_an_attempt_that_is_taken_over_is_running_until_its_nodes_say_more() -> None:
    state, _ = play(POLICY, *running(POLICY)[:-1])
    assert state.phase is Phase.FORMING
    assert take_over(state).phase is Phase.RUNNING


def test_the_drain_limit_begins_again_at_a_takeover() -> None:
    state, _ = taken_over(exited(W0))
    assert play_on(state, 1000.0 + DRAIN_S - 1, Tick())[0].suspicion is None
    assert play_on(state, 1000.0 + DRAIN_S, Tick())[0].suspicion is Reason.DRAIN_TIMEOUT


def test_the_limit_of_a_stall_begins_again_at_a_takeover() -> None:
    state, _ = taken_over()
    assert state.deadline is None
    assert play_on(state, 1000.0 + STALL_S - 1, Tick())[0].suspicion is None
    assert play_on(state, 1000.0 + STALL_S, Tick())[0].suspicion is Reason.STALLED


def test_the_others_may_still_save_after_a_takeover() -> None:
    saves = TaskReported(W1, "trains", 1000.0, saves_when_preempted=True)
    state, _ = taken_over(saves, exited(W1, 42))
    assert play_on(state, 1000.0 + SAVING_S - 1, Tick())[0].reason is None
    assert play_on(state, 1000.0 + SAVING_S, Tick())[0].reason is Reason.TASK_FAILED


def test_a_takeover_repeats_the_restart_of_a_single_task_that_may_not_have_arrived() -> None:
    policy = replace(SERVED, max_individual_restarts=2)
    assert taken_over(exited(W0, 1), policy=policy)[1] == [RestartTask(W0)]
    assert taken_over(exited(W0, 1), TaskStarted(W0, 200, 1020.0, 2), policy=policy)[1] == []
    left = take_over(end_of(policy, exited(W0, 1)))
    assert play_on(left, NodeAttached("a"), NodeLost("b", "gone"), NodeAttached("c"))[1] == []


def test_a_takeover_starts_no_task_whose_start_the_journal_has_lost() -> None:
    state, _ = play(POLICY, 10.0, *running(POLICY))
    state, actions = play_on(take_over(replace(state, started={})), NodeAttached("a"), NodeAttached("b"))
    assert (state.detached, actions) == (frozenset(), [])


def test_a_server_that_has_ended_is_no_failure_if_the_chief_then_reports_that_it_has_finished() -> None:
    outage: tuple[Event | float, ...] = (*map(NodeUnheard, "ac"), 50.0, NodeHeard("c"), exited(PS, 1), NodeHeard("a"))
    assert end_of(SERVED, *outage, exited(CHIEF)).reason is Reason.SUCCEEDED
    assert end_of(SERVED, *outage, 50.0 + NEWS_S, Tick()).reason is Reason.TASK_FAILED


def test_a_trainer_that_has_failed_stops_the_others_although_a_node_is_not_heard() -> None:
    state, actions = play(POLICY, 10.0, *running(POLICY), NodeUnheard("b"), exited(W0, 1))
    assert state.reason is Reason.TASK_FAILED
    assert any(isinstance(action, StopNodes) for action in actions)


def test_a_node_that_is_lost_is_no_longer_waited_for() -> None:
    state = end_of(POLICY, NodeUnheard("b"), 40.0, NodeLost("b", "not reconnected"))
    assert (state.reason, state.unheard) == (Reason.NODE_LOST, frozenset())


def test_the_start_limit_waits_for_a_node_that_is_not_heard() -> None:
    """Its task may have joined the cluster, and the training may even be over."""
    unheard = (*running(POLICY)[:-1], NodeUnheard("b"), 600.0, Tick())
    state, _ = play(POLICY, *unheard)
    assert (state.phase, state.suspicion) == (Phase.FORMING, None)
    assert play(POLICY, *unheard, NodeHeard("b"), exited(W0), exited(W1))[0].reason is Reason.SUCCEEDED
    late, _ = play(POLICY, *unheard, NodeHeard("b"), 600.0 + STACKS_S, Tick())
    assert late.suspicion is Reason.START_TIMEOUT
