"""While the connection to a node is broken, nothing that its tasks do is missing: it may have happened."""

from __future__ import annotations

import signal

from launcher.gang.decide import FAILURE_GRACE_S, SAVING_S, STACKS_S, take_over
from launcher.gang.events import (
    Action,
    AskStacks,
    EndAnnounced,
    Event,
    Interrupted,
    NodeAttached,
    NodeEmpty,
    NodeHeard,
    NodeLost,
    NodeUnheard,
    ProgramEnded,
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
from launcher.tasks import TaskId, parse_task_id
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


def reasons(state: AttemptState, before: tuple[Event | float, ...], ended: TaskId) -> list[Reason | None]:
    """Why the attempt ends if, after our stop, the task reports that it had finished before, or that it ends now."""
    empty = [NodeEmpty(node, 0, 0) for node in state.policy.nodes]
    ends = (replace(exited(ended), before_stop=True), exited(ended))
    return [play_on(state, *before, end, *empty)[0].reason for end in ends]


def test_a_lost_node_is_no_failure_if_the_others_then_report_that_they_had_finished() -> None:
    outage: tuple[Event | float, ...] = (*map(NodeUnheard, "abc"), 50.0, NodeHeard("a"), NodeLost("b", "gone"))
    assert reasons(end_of(SERVED), outage, CHIEF) == [Reason.SUCCEEDED, Reason.NODE_LOST]


def test_a_node_that_is_gone_at_a_takeover_is_no_failure_if_the_others_then_report_that_they_had_finished() -> None:
    left = replace(take_over(end_of(SERVED)), deadline=None)
    events = (20.0, NodeAttached("a"), NodeLost("b", "gone"), NodeAttached("c"))
    assert reasons(left, events, CHIEF) == [Reason.SUCCEEDED, Reason.NODE_LOST]


def test_a_server_that_has_ended_is_no_failure_if_the_chief_then_reports_that_it_had_finished() -> None:
    outage: tuple[Event | float, ...] = (*map(NodeUnheard, "ac"), 50.0, NodeHeard("c"), exited(PS, 1), NodeHeard("a"))
    assert reasons(end_of(SERVED), outage, CHIEF) == [Reason.SUCCEEDED, Reason.TASK_FAILED]


def test_nodes_that_are_taken_away_are_no_failure_if_all_tasks_then_report_that_they_had_finished() -> None:
    announced = (EndAnnounced("preempted", "the job was taken away"), replace(exited(W0), before_stop=True))
    assert reasons(end_of(POLICY), announced, W1) == [Reason.SUCCEEDED, Reason.ANNOUNCED]


def test_a_failure_that_crosses_the_order_to_stop_is_not_held_against_its_task() -> None:
    """Its cause may be the same as that of the stop: a peer that is lost."""
    failed = replace(exited(W1, 1), before_stop=True)
    state = end_of(POLICY, NodeLost("a", "gone"), failed, NodeEmpty("b", 0, 0))
    assert (state.reason, W1 in state.stopped) == (Reason.NODE_LOST, True)


def test_programs_that_return_after_ctrl_c_have_not_finished() -> None:
    """They may have handled KeyboardInterrupt."""
    returned = (ProgramEnded(W0, 1010.0), ProgramEnded(W1, 1010.0), exited(W0), exited(W1))
    empty = (NodeEmpty("a", 0, 0), NodeEmpty("b", 0, 0))
    assert end_of(POLICY, Interrupted(signal.SIGINT), *returned, *empty).reason is Reason.INTERRUPTED


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
    lost = (NodeAttached("a"), NodeLost("b", "gone"), NodeAttached("c"))
    assert play_on(left, *lost)[1] == [StopNodes(FAILURE_GRACE_S)]


def test_a_takeover_starts_no_task_whose_start_the_journal_has_lost() -> None:
    state, _ = play(POLICY, 10.0, *running(POLICY))
    state, actions = play_on(take_over(replace(state, started={})), NodeAttached("a"), NodeAttached("b"))
    assert (state.detached, actions) == (frozenset(), [])


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
