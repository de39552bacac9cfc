"""The rules of a gang: histories as data, and properties of every history."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given

from launcher.gang.decide import FAILURE_GRACE_S, INTERRUPT_S, STACKS_S, STOP_MARGIN_S, decide, new_attempt
from launcher.gang.events import (
    AskStacks,
    Event,
    Finish,
    Interrupted,
    LeaderWaits,
    NodeEmpty,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    PrepareNodes,
    ProgramEnded,
    StacksReceived,
    StartTasks,
    StopNodes,
    TaskExited,
    TaskHalted,
    TaskInterrupted,
    TaskReported,
    Tick,
)
from launcher.gang.facts import REFUSALS
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import BEFORE_START, Phase, Reason
from launcher.gang.waiting import render_waiting
from launcher.spec.strategies import RULES
from launcher.tasks import TaskId, parse_task_id
from tests.harness.builders.gang import (
    ALL_HEARD,
    CTRL_C,
    DRAIN_S,
    EVALUATOR,
    FAILURE_STOP,
    GRACE_S,
    ONE_NODE,
    REFUSED,
    START_S,
    TWO_NODES,
    W0,
    W1,
    W2,
    WITH_EVALUATOR,
    actions_of,
    exited,
    histories,
    listening,
    make_policy,
    play,
    play_on,
    preparing,
    replay,
    running,
    started,
)
from worker_entry.protocol.values import Activity, CrashRecord, Problem, TaskExit

TERM = Interrupted(signal.SIGTERM)
OPTIONAL = (Phase.CLAIMING, Phase.SYNCING, Phase.CHECKING)


def test_a_policy_without_a_deciding_task_is_rejected() -> None:
    """Otherwise, the empty set of deciding tasks would count as succeeded from the start."""
    with pytest.raises(ValueError, match="needs a task whose end decides"):
        make_policy({"a": [EVALUATOR]})
    with pytest.raises(ValueError, match="needs a task whose end decides"):
        AttemptPolicy({"a": frozenset([W0])}, frozenset([W0]), 1.0, 1.0, 1.0, strategy=RULES["parameter_server"])


class TestSuccess:
    def test_an_attempt_succeeds_when_all_workers_exit_with_zero(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), exited(W1), exited(W0), NodeEmpty("a"), NodeEmpty("b"))

        assert actions == [
            PrepareNodes(),
            StartTasks({W0: 20000, W1: 20001}),
            FAILURE_STOP,  # for processes that a task may have left behind
            Finish(),
        ]
        assert (state.phase, state.reason, state.stopped) == (Phase.FINISHED, Reason.SUCCEEDED, frozenset())

    def test_an_attempt_passes_through_its_phases_in_order(self) -> None:
        policy = make_policy(TWO_NODES)
        state = new_attempt(policy, 0.0)
        phases = [state.phase]

        for event in [*running(policy), exited(W0), exited(W1), NodeEmpty("a"), NodeEmpty("b")]:
            state, _ = decide(state, event, 0.0)
            if state.phase is not phases[-1]:
                phases.append(state.phase)

        assert phases == [phase for phase in Phase if phase not in OPTIONAL]

    def test_a_single_task_needs_no_open_port_and_no_cluster(self) -> None:
        policy = make_policy({"a": [W0]})

        state, actions = play(
            policy, *preparing(policy), *started(W0), 10 * START_S, Tick(), exited(W0), NodeEmpty("a")
        )

        assert actions[1:] == [StartTasks({W0: 20000}), FAILURE_STOP, Finish()]
        assert state.reason is Reason.SUCCEEDED

    def test_no_node_is_prepared_before_every_node_is_ready(self) -> None:
        assert play(make_policy(TWO_NODES), NodeReady("b"))[1] == []

    def test_no_task_is_started_before_every_node_is_prepared(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, NodeReady("a"), NodeReady("b"), NodePrepared("a", {W0: 20000}))

        assert actions == [PrepareNodes()]
        assert state.phase in BEFORE_START

    def test_tasks_that_exit_with_zero_before_any_port_opens_succeed(self) -> None:
        policy = make_policy(ONE_NODE)

        state, _ = play(policy, *preparing(policy), *started(W0, W1), exited(W0), exited(W1), NodeEmpty("a"))

        assert state.reason is Reason.SUCCEEDED


class TestEvaluator:
    def test_an_evaluator_is_stopped_when_the_drain_time_after_the_workers_is_over(self) -> None:
        policy = make_policy(WITH_EVALUATOR)

        state, actions = play(
            policy, *running(policy), exited(W0), 50.0, exited(W1), 49.0 + DRAIN_S, Tick(), 50.0 + DRAIN_S, Tick()
        )

        assert actions[2:] == [FAILURE_STOP]
        assert (state.reason, state.stopped) == (Reason.SUCCEEDED, frozenset({EVALUATOR}))

    def test_an_evaluator_that_exits_ends_the_drain_early(self) -> None:
        policy = make_policy(WITH_EVALUATOR)

        state, _ = play(policy, *running(policy), exited(W0), exited(W1), exited(EVALUATOR))

        assert (state.reason, state.stopped) == (Reason.SUCCEEDED, frozenset())

    def test_a_failed_evaluator_does_not_fail_the_attempt(self) -> None:
        policy = make_policy(WITH_EVALUATOR)

        state, actions = play(policy, *running(policy), exited(EVALUATOR, 1))
        assert (state.phase, actions[2:]) == (Phase.RUNNING, [])

        state, actions = play_on(state, exited(W0), exited(W1))
        assert (state.reason, actions) == (Reason.SUCCEEDED, [FAILURE_STOP])

    def test_an_evaluator_exit_does_not_start_the_drain_of_the_workers(self) -> None:
        policy = make_policy(WITH_EVALUATOR)

        state, _ = play(policy, *running(policy), exited(EVALUATOR))

        assert state.deadline is None

    def test_a_cluster_forms_without_waiting_for_the_evaluator(self) -> None:
        policy = make_policy(WITH_EVALUATOR)

        state, _ = play(policy, *preparing(policy), *started(W0, W1, EVALUATOR), *listening(W0, W1), ALL_HEARD)

        assert state.phase is Phase.RUNNING

    def test_the_drain_of_an_evaluator_starts_when_the_last_worker_ends(self) -> None:
        policy = make_policy(WITH_EVALUATOR)

        state, _ = play(policy, *running(policy), exited(W0), DRAIN_S, exited(W1))

        assert (state.phase, state.deadline) == (Phase.RUNNING, 2 * DRAIN_S)


class TestFailure:
    def test_a_failed_worker_stops_the_others_after_a_short_grace(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), exited(W1, 3))

        assert actions[2:] == [StopNodes(1.0)]
        assert (state.reason, state.stopped) == (Reason.TASK_FAILED, frozenset({W0}))

    def test_after_a_task_got_sigkill_only_signal_handlers_get_grace(self) -> None:
        policy = make_policy(TWO_NODES)

        _, actions = play(policy, *running(policy), exited(W1, signal=signal.SIGKILL))

        assert actions[2:] == [StopNodes(1.0, for_handlers=True)]

    def test_a_failed_attempt_finishes_when_every_node_is_empty(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), exited(W1, 3), NodeEmpty("b"))
        assert (state.phase, actions[3:]) == (Phase.STOPPING, [])

        state, actions = play_on(state, exited(W0, signal=signal.SIGKILL), NodeEmpty("a"))
        assert (state.phase, state.reason, actions) == (Phase.FINISHED, Reason.TASK_FAILED, [Finish()])

    def test_a_task_that_fails_while_the_cluster_forms_fails_the_attempt(self) -> None:
        policy = make_policy(TWO_NODES)

        state, _ = play(policy, *preparing(policy), *started(W0, W1), exited(W0, signal=signal.SIGSEGV))

        assert state.reason is Reason.TASK_FAILED

    def test_a_task_that_fails_after_others_succeeded_fails_the_attempt(self) -> None:
        policy = make_policy(TWO_NODES)

        state, _ = play(policy, *running(policy), exited(W0), exited(W1, 1))

        assert (state.reason, state.stopped) == (Reason.TASK_FAILED, frozenset())

    def test_a_task_that_starts_after_a_failure_counts_as_stopped(self) -> None:
        policy = make_policy(TWO_NODES)

        state, _ = play(policy, *preparing(policy), *started(W0), exited(W0, 1), *started(W1))

        assert state.stopped == {W1}


class TestDrain:
    def test_a_worker_that_exits_early_with_zero_stops_no_other_task(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), exited(W0), DRAIN_S - 1, Tick())

        assert (state.phase, actions[2:]) == (Phase.RUNNING, [])

    def test_tasks_still_running_after_the_drain_time_are_stopped(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), 7.0, exited(W0), 7.0 + DRAIN_S, Tick(), StacksReceived({}))

        assert actions[2:] == [AskStacks(), FAILURE_STOP]
        assert (state.reason, state.stopped) == (Reason.DRAIN_TIMEOUT, frozenset({W1}))

    def test_the_drain_time_starts_at_the_first_exit_of_a_worker(self) -> None:
        policy = make_policy({"a": [W0, W1, W2]})

        ends = (exited(W0), DRAIN_S - 1, exited(W1), DRAIN_S, Tick(), StacksReceived({}))
        state, _ = play(policy, *running(policy), *ends)

        assert (state.reason, state.stopped) == (Reason.DRAIN_TIMEOUT, frozenset({W2}))

    def test_the_drain_time_applies_if_the_first_exit_precedes_open_ports(self) -> None:
        policy = make_policy({"a": [W0, W1, W2]})

        state, _ = play(policy, *preparing(policy), *started(W0, W1, W2), 5.0, exited(W0), *listening(W1, W2))

        assert (state.phase, state.deadline) == (Phase.RUNNING, 5.0 + DRAIN_S)

    def test_the_drain_time_applies_if_the_first_exit_precedes_another_start(self) -> None:
        policy = make_policy(TWO_NODES)

        state, _ = play(policy, *preparing(policy), *started(W0), exited(W0), 5.0, *started(W1))

        assert (state.phase, state.deadline) == (Phase.RUNNING, 5.0 + DRAIN_S)

    def test_the_drain_timeout_is_extended_for_a_task_at_work(self) -> None:
        policy = make_policy(TWO_NODES)
        at_work = StacksReceived({}, {W1: Activity(idle_s=2.0)})

        state, actions = play(policy, *running(policy), 7.0, exited(W0), 7.0 + DRAIN_S, Tick(), at_work)
        assert (state.phase, state.deadline, state.busy) == (Phase.RUNNING, 7.0 + 2 * DRAIN_S, {W1: "at work"})

        state, more = play_on(state, 7.0 + 2 * DRAIN_S, Tick(), StacksReceived({}, {W1: Activity(idle_s=DRAIN_S)}))
        assert (state.reason, [*actions[2:], *more]) == (
            Reason.DRAIN_TIMEOUT,
            [AskStacks(), AskStacks(), FAILURE_STOP],
        )

    def test_a_task_that_ends_while_its_stack_is_requested_counts_as_ended(self) -> None:
        policy = make_policy(TWO_NODES)

        state, _ = play(policy, *running(policy), exited(W0), DRAIN_S, Tick(), exited(W1), StacksReceived({}))

        assert state.reason is Reason.SUCCEEDED

    def test_a_drain_timeout_of_zero_means_no_limit(self) -> None:
        policy = make_policy(TWO_NODES, drain_s=0.0)

        state, _ = play(policy, *running(policy), exited(W0), 1e9, Tick())

        assert (state.phase, state.deadline) == (Phase.RUNNING, None)


class TestStartTimeout:
    def test_a_start_timeout_reports_the_tasks_without_an_open_port(self) -> None:
        policy = make_policy({"a": [W0, W1, W2]})

        due = (*preparing(policy), *started(W0, W1, W2), *listening(W1), START_S, Tick())
        state, actions = play(policy, *due, StacksReceived({W0: "at work"}))

        assert actions[2:] == [AskStacks(), FAILURE_STOP]
        assert state.stacks == {W0: "at work"}
        assert (state.reason, state.missing) == (Reason.START_TIMEOUT, [W0, W2])

    def test_a_start_timeout_reports_the_missing_tasks_after_all_were_stopped(self) -> None:
        policy = make_policy(ONE_NODE)
        state, _ = play(
            policy, *preparing(policy), *started(W0, W1), *listening(W1), START_S, Tick(), StacksReceived({})
        )

        state, _ = play_on(state, *(exited(task, signal=signal.SIGTERM) for task in (W0, W1)), NodeEmpty("a"))

        assert (state.phase, state.missing) == (Phase.FINISHED, [W0])

    def test_a_start_timeout_reports_a_task_with_a_port_that_opens_too_late(self) -> None:
        policy = make_policy(ONE_NODE)

        due = (*preparing(policy), *started(W0, W1), *listening(W1), START_S, Tick())
        state, _ = play(policy, *due, StacksReceived({}), *listening(W0))

        assert state.missing == [W0]

    def test_a_port_that_opens_before_the_stacks_arrive_cancels_the_start_timeout(self) -> None:
        policy = make_policy(ONE_NODE)

        due = (*preparing(policy), *started(W0, W1), *listening(W1), START_S, Tick())
        state, actions = play(policy, *due, *listening(W0), ALL_HEARD, StacksReceived({}), 1000.0, Tick())

        assert (state.phase, state.suspicion, state.deadline) == (Phase.RUNNING, None, None)
        assert actions[2:] == [AskStacks()]

    def test_a_start_timeout_reports_a_task_that_has_not_joined_the_leader(self) -> None:
        policy = make_policy(ONE_NODE)
        waits = (*preparing(policy), *started(W0, W1), LeaderWaits(frozenset({W1})), *listening(W0, W1))

        state, _ = play(policy, *waits, START_S, Tick(), StacksReceived({}))
        assert (state.reason, state.missing) == (Reason.START_TIMEOUT, [W1])

        state, _ = play(policy, *waits, LeaderWaits(frozenset()))
        assert (state.phase, state.missing) == (Phase.RUNNING, [])

    def test_a_start_timeout_does_not_wait_forever_for_stacks(self) -> None:
        policy = make_policy(ONE_NODE)

        state, _ = play(policy, *preparing(policy), *started(W0, W1), START_S, Tick(), START_S + STACKS_S, Tick())

        assert (state.phase, state.reason) == (Phase.STOPPING, Reason.START_TIMEOUT)

    def test_the_start_timeout_applies_to_nodes_that_do_not_answer(self) -> None:
        state, actions = play(make_policy(TWO_NODES), NodeReady("a"), START_S, Tick())

        assert actions == [FAILURE_STOP]
        assert (state.reason, state.prepared) == (Reason.START_TIMEOUT, frozenset())

    def test_the_start_timeout_does_not_expire_early(self) -> None:
        policy = make_policy(ONE_NODE)

        state, _ = play(policy, *preparing(policy), *started(W0, W1), START_S - 0.1, Tick())

        assert state.phase is Phase.FORMING

    def test_the_start_timeout_does_not_apply_once_the_cluster_is_up(self) -> None:
        policy = make_policy(ONE_NODE)

        state, _ = play(policy, *running(policy), START_S, Tick())

        assert (state.phase, state.deadline) == (Phase.RUNNING, None)

    def test_a_start_timeout_of_zero_means_no_limit(self) -> None:
        policy = make_policy(TWO_NODES, start_s=0.0)

        assert play(policy, 1e9, Tick())[0].phase is Phase.CONNECTING
        assert play(policy, *preparing(policy), *started(W0, W1), 1e9, Tick())[0].phase is Phase.FORMING


class TestRefusalAndLoss:
    def test_a_node_that_refuses_stops_the_other_nodes(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, NodeReady("a"), NodeReady("b"), REFUSED, NodeEmpty("a"), NodeEmpty("b"))

        assert actions == [PrepareNodes(), FAILURE_STOP, Finish()]
        assert (state.reason, state.refusals) == (Reason.REFUSED, (REFUSED,))

    def test_refusals_of_all_nodes_are_recorded(self) -> None:
        other = NodeRefused("a", (Problem("port-taken", "port 20000 is held by nginx"),))

        state, _ = play(make_policy(TWO_NODES), NodeReady("a"), NodeReady("b"), REFUSED, other)

        assert state.refusals == (REFUSED, other)

    def test_the_number_of_recorded_refusals_is_limited(self) -> None:
        for refusal in (NodeRefused("b", ()), NodeRefused("b", REFUSED.problems * 900)):
            state, _ = play(make_policy(TWO_NODES), NodeReady("a"), NodeReady("b"), *[refusal] * 3000)

            assert 2 <= len(state.refusals) <= REFUSALS
            assert sum(len(kept.problems) for kept in state.refusals) < 2 * REFUSALS

    def test_a_node_that_refuses_during_training_stops_the_attempt(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), REFUSED)

        assert (state.reason, actions[2:]) == (Reason.REFUSED, [FAILURE_STOP])

    def test_an_unreachable_node_stops_the_attempt_only_after_all_nodes_were_tried(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, NodeLost("b", "connection refused"))
        assert (state.reason, actions) == (None, [])

        state, actions = play(policy, NodeLost("b", "connection refused"), NodeLost("a", "host key changed"))
        assert (state.reason, actions) == (Reason.NODE_LOST, [Finish()])
        assert state.lost == {"b": "connection refused", "a": "host key changed"}

        state, actions = play(policy, NodeLost("b", "connection refused"), NodeReady("a"), NodeEmpty("a"))
        assert (state.reason, actions) == (Reason.NODE_LOST, [FAILURE_STOP, Finish()])

    def test_a_lost_node_stops_the_other_nodes_in_every_phase(self) -> None:
        policy = make_policy(TWO_NODES)
        history = running(policy)

        for length in range(1, len(history) + 1):  # from the first node's answer on
            state, actions = play(policy, *history[:length], NodeLost("b", "the agent ended"), NodeEmpty("a"))

            assert actions[-2:] == [FAILURE_STOP, Finish()]
            assert (state.reason, state.lost) == (Reason.NODE_LOST, {"b": "the agent ended"})

    def test_a_refusal_stops_all_nodes_in_every_phase(self) -> None:
        policy = make_policy(TWO_NODES)
        history = running(policy)

        for length in range(len(history) + 1):
            state, actions = play(policy, *history[:length], REFUSED, NodeEmpty("a"), NodeEmpty("b"))

            # If no agent has answered yet, there is nothing to stop.
            assert actions[-2:] == ([FAILURE_STOP, Finish()] if length else [Finish()])
            assert state.reason is Reason.REFUSED

    def test_losing_the_only_node_ends_the_attempt(self) -> None:
        policy = make_policy(ONE_NODE)

        state, actions = play(policy, *running(policy), NodeLost("a", "the agent ended"))

        assert (state.phase, actions[2:]) == (Phase.FINISHED, [Finish()])

    def test_the_first_reason_for_a_node_loss_is_kept(self) -> None:
        lost = [NodeLost("b", "the agent ended"), NodeLost("b", "no data for 60 s")]

        assert play(make_policy(TWO_NODES), *lost)[0].lost == {"b": "the agent ended"}

    def test_an_empty_node_that_closes_its_connection_is_not_lost(self) -> None:
        policy = make_policy(TWO_NODES)

        state, _ = play(policy, *running(policy), exited(W0, 1), NodeEmpty("b"), NodeLost("b", "the agent ended"))

        assert state.lost == {}

    def test_the_attempt_does_not_wait_for_a_node_lost_while_stopping(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), exited(W0, 1), NodeEmpty("a"), NodeLost("b", "the agent ended"))

        assert (state.reason, actions[3:]) == (Reason.TASK_FAILED, [Finish()])

    def test_a_node_that_never_reports_its_processes_ended_counts_as_lost(self) -> None:
        policy = make_policy(TWO_NODES)
        stopping = [*running(policy), exited(W0, 1), NodeEmpty("a")]
        due = FAILURE_GRACE_S + STOP_MARGIN_S

        assert play(policy, *stopping, due - 0.1, Tick())[0].phase is Phase.STOPPING
        state, actions = play(policy, *stopping, due, Tick())
        assert (state.phase, list(state.lost), actions[3:]) == (Phase.FINISHED, ["b"], [Finish()])


INTERRUPT = StopNodes(GRACE_S, interrupts=True)
KEYBOARD = CrashRecord(1.0, "KeyboardInterrupt", "")


class TestInterruption:
    def test_an_interruption_stops_all_nodes_with_the_configured_grace(self) -> None:
        policy = make_policy(TWO_NODES)

        for event in (CTRL_C, TERM, Interrupted(signal.SIGHUP), Interrupted(signal.SIGPIPE)):
            state, actions = play(policy, *running(policy), event)

            assert actions[2:] == [StopNodes(GRACE_S, interrupts=event is CTRL_C)]
            assert (state.reason, state.signal) == (Reason.INTERRUPTED, event.signal)

    def test_a_second_ctrl_c_kills_all_tasks(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), CTRL_C, CTRL_C)

        assert actions[2:] == [INTERRUPT, StopNodes(0.0)]
        assert (state.phase, state.signal) == (Phase.STOPPING, signal.SIGINT)
        assert state.deadline == STOP_MARGIN_S

    def test_after_a_second_ctrl_c_nothing_gives_the_tasks_more_time(self) -> None:
        policy = make_policy(TWO_NODES)

        for late in (Tick(), TERM):
            _, actions = play(policy, *running(policy), CTRL_C, INTERRUPT_S, CTRL_C, late)

            assert actions[2:] == [INTERRUPT, StopNodes(0.0)]

    def test_an_interruption_in_any_phase_stops_the_nodes_that_have_answered(self) -> None:
        policy = make_policy(TWO_NODES)
        history = running(policy)

        for length in range(len(history) + 1):
            state, actions = play(policy, *history[:length], CTRL_C, NodeEmpty("a"), NodeEmpty("b"))

            assert actions[-2:] == ([INTERRUPT, Finish()] if length else [Finish()])
            assert state.reason is Reason.INTERRUPTED

    def test_ctrl_c_and_a_user_request_interrupt_the_tasks(self) -> None:
        policy = make_policy(TWO_NODES)
        for event in (CTRL_C, Interrupted(signal.SIGTERM, asked=True)):
            assert play(policy, *running(policy), event)[1][2:] == [INTERRUPT]

    @pytest.mark.parametrize(
        ("then", "insists"),
        [
            ((), True),
            ((TaskInterrupted(W0),), False),  # it may need the others to save
            ((TaskInterrupted(W0), TaskInterrupted(W1)), False),
            ((TaskInterrupted(W0), ProgramEnded(W0, 1.0, KEYBOARD)), True),
            ((TaskInterrupted(W0), exited(W0, 1)), True),
            ((exited(W0, 1), exited(W1, 1)), False),
            ((TaskInterrupted(W0), ProgramEnded(W0, 1.0, KEYBOARD), exited(W1, 1)), False),
        ],
    )
    def test_an_interruption_escalates_after_three_seconds_unless_a_program_may_be_saving(
        self, then: tuple[Event, ...], insists: bool
    ) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), CTRL_C, *then, INTERRUPT_S - 0.1, Tick())
        assert actions[2:] == [INTERRUPT]
        _, actions = play(policy, *running(policy), CTRL_C, *then, INTERRUPT_S, Tick(), Tick())

        assert actions[2:] == [INTERRUPT, *([StopNodes(FAILURE_GRACE_S)] if insists else [])]
        assert state.reason is Reason.INTERRUPTED

    def test_an_interruption_escalates_as_soon_as_a_program_has_saved(self) -> None:
        policy = make_policy(TWO_NODES)
        history = [*running(policy), CTRL_C, TaskInterrupted(W0), INTERRUPT_S + 2, Tick()]

        assert play(policy, *history)[1][2:] == [INTERRUPT]
        assert play(policy, *history, exited(W0, 0))[1][2:] == [INTERRUPT, StopNodes(FAILURE_GRACE_S)]

    def test_ctrl_c_while_stopping_kills_tasks_and_keeps_the_original_failure(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), exited(W0, 1), CTRL_C)

        assert actions[2:] == [FAILURE_STOP, StopNodes(0.0)]
        assert (state.reason, state.signal) == (Reason.TASK_FAILED, None)

    def test_repeated_signals_other_than_ctrl_c_do_not_shorten_the_grace(self) -> None:
        policy = make_policy(TWO_NODES)

        # `timeout` sends TERM twice; Ctrl-C also ends the `tee` that reads our output.
        for again in (TERM, Interrupted(signal.SIGHUP), Interrupted(signal.SIGPIPE)):
            state, actions = play(policy, *running(policy), TERM, again)

            assert actions[2:] == [StopNodes(GRACE_S)]
            assert state.signal == signal.SIGTERM

    def test_repeated_ctrl_c_does_not_delay_the_end(self) -> None:
        policy = make_policy(TWO_NODES)
        impatience: list[Event | float] = []
        for second in range(60):
            impatience += [float(second), CTRL_C, Tick()]

        state, _ = play(policy, *running(policy), *impatience)

        assert state.phase is Phase.FINISHED


class TestBrokenAgents:
    def test_events_of_a_node_outside_the_plan_are_ignored(self) -> None:
        policy = make_policy(ONE_NODE)
        asked, _ = play(policy, *[NodeReady(node) for node in policy.nodes])

        assert asked.phase is Phase.PREPARING
        assert play_on(asked, NodePrepared("another", {})) == (asked, [])

    def test_events_after_the_end_of_an_attempt_are_ignored(self) -> None:
        policy = make_policy(TWO_NODES)
        end, _ = play(policy, *running(policy), exited(W0, 1), NodeEmpty("a"), NodeEmpty("b"))

        late = [exited(W1, 1), NodeLost("a", "the agent ended"), REFUSED, CTRL_C, *running(policy), 1e9, Tick()]

        assert play_on(end, *late) == (end, [])

    def test_a_node_that_reports_ready_twice_is_asked_to_prepare_once(self) -> None:
        policy = make_policy(TWO_NODES)

        _, actions = play(policy, NodeReady("a"), NodeReady("b"), NodeReady("b"), NodeReady("a"))

        assert actions == [PrepareNodes()]

    def test_only_the_first_exit_of_a_task_counts(self) -> None:
        policy = make_policy(TWO_NODES)

        state, _ = play(policy, *running(policy), exited(W0), exited(W0, 1))

        assert (state.phase, state.exits[W0].exit.code) == (Phase.RUNNING, 0)

    def test_events_of_unknown_or_unstarted_tasks_are_ignored(self) -> None:
        policy = make_policy(TWO_NODES)
        unknown = TaskId("worker", 7)

        assert play(policy, NodeReady("a"), exited(W0, 1))[0].exits == {}
        assert play(policy, *running(policy), *started(unknown), exited(unknown, 1))[0].phase is Phase.RUNNING

    def test_answers_without_a_matching_order_are_ignored(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, NodePrepared("a", {W0: 1}), NodePrepared("b", {W1: 2}), *started(W0))

        assert (state, actions) == (new_attempt(policy, 0.0), [])

    def test_a_node_that_reports_ports_of_another_node_is_not_prepared(self) -> None:
        policy = make_policy(TWO_NODES)

        _, actions = play(
            policy, NodeReady("a"), NodeReady("b"), NodePrepared("a", {W0: 1}), NodePrepared("b", {W0: 2})
        )

        assert actions == [PrepareNodes()]

    def test_a_report_of_an_empty_node_during_training_is_ignored(self) -> None:
        policy = make_policy(TWO_NODES)

        state, actions = play(policy, *running(policy), NodeEmpty("a"), exited(W1, 1), NodeEmpty("b"))

        assert (state.phase, actions[2:]) == (Phase.STOPPING, [FAILURE_STOP])


class TestEveryHistory:
    @given(histories())
    def test_what_the_state_keeps_about_ends_follows_from_the_ends_in_every_history(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        policy, _ = told
        for _, _, after in replay(*told):
            crashed = {task for task, end in after.programs.items() if end.crash is not None}
            failed = {task for task, end in after.exits.items() if end.failed}
            servers = policy.servers & after.exits.keys()
            assert after.ended == policy.trainers & (after.exits.keys() | after.programs.keys())
            assert after.bad_ends == policy.trainers & (crashed | failed) | servers

    @given(histories())
    def test_actions_follow_the_only_valid_order_in_every_history(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        kinds = [type(action) for action in actions_of(replay(*told))]

        order = (PrepareNodes, StartTasks, AskStacks, StopNodes, Finish)
        assert kinds == sorted(kinds, key=order.index)
        assert all(kinds.count(kind) <= 1 for kind in order if kind not in (StopNodes, AskStacks))

    @given(histories())
    def test_no_history_starts_tasks_before_every_node_holds_their_ports(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        policy, _ = told
        for _, action, after in replay(*told):
            if isinstance(action, StartTasks):
                assert after.prepared == policy.nodes.keys()
                assert action.ports.keys() == policy.tasks

    @given(histories())
    def test_the_stop_grace_never_grows_in_any_history(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        graces = [action.grace_s for action in actions_of(replay(*told)) if isinstance(action, StopNodes)]

        assert graces == sorted(graces, reverse=True)

    @given(histories())
    def test_every_history_stops_all_nodes_with_processes_before_it_finishes(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        told_to_stop: set[str] = set()
        for _, action, after in replay(*told):
            reachable = after.ready - after.empty.keys() - after.lost.keys()
            if isinstance(action, StopNodes):
                told_to_stop |= reachable
            elif isinstance(action, Finish):
                assert after.ready <= told_to_stop | after.lost.keys()
                assert not reachable

    @given(histories())
    def test_the_first_reason_for_an_end_never_changes_in_any_history(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        reasons = [after.reason for _, _, after in replay(*told)]

        given_ones = [reason for reason in reasons if reason is not None]
        assert len(set(given_ones)) <= 1
        assert reasons == [None] * (len(reasons) - len(given_ones)) + given_ones

    @given(histories())
    def test_no_history_succeeds_unless_every_worker_exited_with_zero(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        policy, history = told
        steps = replay(policy, history)
        if steps and steps[-1][2].reason is Reason.SUCCEEDED:
            trainers = [task for task in policy.tasks if task.trains]
            assert all(steps[-1][2].exits[task].exit.ok for task in trainers)

    @given(histories())
    def test_every_history_ends_after_an_interruption(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        policy, history = told
        end = history[-1][0] if history else 0.0

        steps = replay(policy, [*history, (end, CTRL_C), (end + 1e6, Tick())])

        assert steps[-1][2].phase is Phase.FINISHED
        assert isinstance(actions_of(steps)[-1], Finish)

    @given(histories())
    def test_no_history_waits_forever_except_in_training_or_without_a_limit(
        self, told: tuple[AttemptPolicy, list[tuple[float, Event]]]
    ) -> None:
        policy, history = told
        end = history[-1][0] if history else 0.0

        steps = replay(policy, [*history, *((end + 1e6 * turn, Tick()) for turn in (1, 2, 3))])

        state = steps[-1][2]
        if state.phase in (*BEFORE_START, Phase.FORMING):
            assert policy.start_s == 0
        elif state.phase is Phase.RUNNING:
            assert policy.drain_s == 0 or not any(task.trains for task in state.exits)
        else:
            assert state.phase is Phase.FINISHED


class TestOutOfStep:
    """All tasks are asked for their stacks before the remaining tasks are stopped."""

    CRASH = CrashRecord(1009.0, "InternalError", "Collective instance 151 expected type 0 but got type 2")
    APART = TaskExited(W1, TaskExit(1), 1010.0, CRASH)

    def test_stacks_are_requested_before_out_of_step_tasks_are_stopped(self) -> None:
        policy = make_policy({"a": [W0, W1, W2]})

        state, actions = play(policy, *running(policy), self.APART)
        assert (actions[-1], state.reason) == (AskStacks(), None)

        state, actions = play_on(state, exited(W2, 1), StacksReceived({W0: "here"}))
        assert (actions, state.reason) == ([FAILURE_STOP], Reason.TASK_FAILED)
        assert state.stacks == {W0: "here"}
        assert state.stopped == {W0}

    def test_out_of_step_tasks_are_stopped_if_no_stacks_arrive(self) -> None:
        policy = make_policy(ONE_NODE)

        state, actions = play(policy, *running(policy), self.APART, STACKS_S, Tick())

        assert (actions[-2:], state.reason) == ([AskStacks(), FAILURE_STOP], Reason.TASK_FAILED)

    def test_stacks_of_ended_tasks_are_not_awaited_when_workers_are_out_of_step(self) -> None:
        policy = make_policy(ONE_NODE)

        _, actions = play(policy, *running(policy), self.APART, exited(W0, 1))
        assert actions[-2:] == [AskStacks(), FAILURE_STOP]

        _, actions = play(make_policy({"a": [W1]}), *running(make_policy({"a": [W1]})), self.APART)
        assert actions[-1] == FAILURE_STOP


def test_the_waiting_message_names_the_strategy_that_a_task_has_built() -> None:
    policy = make_policy(TWO_NODES)
    built = TaskReported(W1, "is building its model", 1002.0, strategy="MirroredStrategy")
    state, _ = play(policy, *preparing(policy), *started(W0, W1), *listening(W0), built)
    assert render_waiting(state, 1010.0) == (
        "waiting for worker:1 on b (port 20001 not open, is building its model, 8 s, has built MirroredStrategy); "
        "worker:0 is ready"
    )


def test_the_waiting_message_names_a_few_tasks_and_counts_the_others() -> None:
    workers = [parse_task_id(f"worker:{number}") for number in range(8)]
    policy = make_policy({"a": [*workers, EVALUATOR]})
    first, last = workers[:3], workers[4:]
    events = [*preparing(policy), *started(*workers, EVALUATOR), *listening(*first, EVALUATOR)]
    state, _ = play(policy, *events, TaskHalted(workers[3], signal.SIGSTOP, 1002.0))
    names = ", ".join(f"{task} on a (port {20000 + task.index} not open)" for task in last[:3])
    stopped = "worker:3 on a (port 20003 not open, stopped by a signal)"
    assert render_waiting(state, 1010.0) == (
        f"waiting for {stopped}, {names} and 1 more; worker:0, worker:1, worker:2 are ready"
    )
    state, _ = play_on(state, *listening(last[3]))
    assert render_waiting(state, 1010.0).startswith(f"waiting for {stopped}, {names}; ")


def test_the_waiting_message_names_a_task_with_an_open_port_that_the_leader_does_not_hear() -> None:
    policy = make_policy(TWO_NODES)
    apart = (TaskReported(W1, "trains", 1002.0), LeaderWaits(frozenset({W1})))
    state, _ = play(policy, *preparing(policy), *started(W0, W1), *listening(W0, W1), *apart)
    message = "waiting for worker:1 on b (port 20001 open, worker:0 has not heard from it); worker:0 is ready"
    assert render_waiting(state, 1010.0) == message
    state, _ = play(policy)
    assert render_waiting(state, 1010.0) == "waiting for worker:0 on a, worker:1 on b"
