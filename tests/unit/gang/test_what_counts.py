"""Trainers decide how an attempt ends, servers serve them, and the other tasks only watch."""

from __future__ import annotations

import signal

import pytest

from launcher.console.messages import render_news
from launcher.gang.decide import decide
from launcher.gang.events import (
    AskStacks,
    EndAnnounced,
    Event,
    Interrupted,
    NodeLost,
    NodeRefused,
    NodeSignalled,
    TaskReported,
    TaskWrote,
    Tick,
)
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.gang.watch.stalls import LEAST_S
from launcher.tasks import TENSORBOARD
from launcher.verdict.judge import exit_status, outcome
from tests.harness.builders.gang import EVALUATOR, REFUSED, W0, W1, exited, make_policy, play, play_on, running
from tests.harness.builders.verdicts import judged
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import Progress

APART = {"a": [W0], "b": [W1], "c": [EVALUATOR]}
TAKEN = EndAnnounced("preempted", "the time of job 7 ends", (), 20.0)


def steps(*tasks: object, done: int = 9) -> list[Event]:
    progress = Progress(done, 1, done, 1000.0, 1001.0, p99_s=0.125)
    return [TaskReported(task, "trains", 1000.0, progress) for task in tasks]  # type: ignore[arg-type]  # tasks of this module


def of(*events: Event | float) -> AttemptState:
    policy = make_policy(APART)
    return play(policy, *running(policy), *events)[0]


class TestProgress:
    def test_progress_of_an_evaluator_does_not_hide_stalled_training(self) -> None:
        policy = make_policy(APART)
        state, _ = play(policy, *running(policy), *steps(W0, W1))
        actions = []
        for number in range(1, 40):
            events = (TaskWrote(EVALUATOR), *steps(EVALUATOR, done=number))
            state, performed = play_on(state, 10.0 * number, *events, Tick())
            actions += performed
        assert AskStacks() in actions
        assert state.reason is Reason.STALLED

    def test_slow_steps_of_an_evaluator_do_not_extend_the_stall_limit(self) -> None:
        slow = TaskReported(EVALUATOR, "trains", 1000.0, Progress(2, 1, 2, 1000.0, 9000.0, p99_s=8000.0))
        state = of(*steps(W0, W1), slow, LEAST_S + 1, Tick())
        assert state.suspicion is Reason.STALLED

    def test_a_step_of_any_trainer_counts_as_progress(self) -> None:
        state = of(*steps(W0, W1), 100.0, *steps(W0, done=10), LEAST_S + 1, Tick())
        assert state.suspicion is None


class TestNodes:
    @pytest.mark.parametrize("what", [NodeLost("c", "gone"), NodeRefused("c", REFUSED.problems)])
    def test_the_loss_of_an_evaluator_node_does_not_fail_the_attempt(self, what: Event) -> None:
        state = of(what)
        assert (state.phase, state.reason) == (Phase.RUNNING, None)
        state, _ = play_on(state, exited(W0), exited(W1))
        assert state.reason is (Reason.SUCCEEDED if isinstance(what, NodeLost) else None)

    def test_the_loss_of_an_evaluator_node_is_reported_as_harmless(self) -> None:
        before = of()
        event = NodeLost("c", "gone")
        after, _ = decide(before, event, 0.0)
        assert render_news(before, after, event) == "Node c was lost: gone; the training does not need it"

    @pytest.mark.parametrize("what", [NodeLost("b", "gone"), NodeRefused("b", REFUSED.problems)])
    def test_the_loss_of_a_node_matters_only_while_its_trainer_runs(self, what: Event) -> None:
        assert of(exited(W1), what).reason is None
        assert of(what).reason is not None

    def test_an_announced_end_matters_only_on_nodes_with_trainers(self) -> None:
        assert of(replace(TAKEN, node="c")).reason is None
        later = of(replace(TAKEN, node="c"), replace(TAKEN, node="b"))
        assert later.reason is Reason.ANNOUNCED

    def test_the_loss_of_any_node_before_the_start_fails_the_attempt(self) -> None:
        policy = make_policy(APART)
        state, _ = play(policy, *running(policy)[:4], NodeLost("c", "gone"))
        assert state.reason is Reason.NODE_LOST


class TestAfterSuccess:
    """All trainers have succeeded; an evaluator drains, or TensorBoard is kept."""

    @pytest.mark.parametrize("lost", ["a", "b", "c"])
    def test_a_node_lost_after_all_trainers_succeeded_changes_nothing(self, lost: str) -> None:
        policy = replace(make_policy({"a": [W0, TENSORBOARD], "b": [W1], "c": [EVALUATOR]}), keeps_auxiliary=True)
        state, _ = play(policy, *running(policy), exited(W0), exited(W1), NodeLost(lost, "gone"))
        assert state.reason in (None, Reason.SUCCEEDED)
        assert not state.failures

    @pytest.mark.parametrize(
        "end",
        [Interrupted(signal.SIGINT), Interrupted(signal.SIGTERM), TAKEN, EndAnnounced("interrupted", "cancelled")],
    )
    def test_an_attempt_ended_after_all_trainers_succeeded_is_a_success(self, end: Event) -> None:
        state = of(exited(W0), exited(W1), end)
        assert state.reason is Reason.SUCCEEDED
        assert (outcome(state), exit_status(state, judged(state)), judged(state).reference) == (
            "succeeded",
            0,
            "succeeded",
        )

    def test_a_slurm_signal_after_success_does_not_delay_the_end(self) -> None:
        state = of(exited(W0), exited(W1), NodeSignalled("a", 1010.0), TAKEN)
        assert state.reason is Reason.SUCCEEDED
        assert state.deadline is not None
        assert state.deadline < 60

    def test_an_interruption_before_all_trainers_succeeded_is_an_interruption(self) -> None:
        state = of(exited(W0), Interrupted(signal.SIGINT))
        assert (state.reason, outcome(state)) == (Reason.INTERRUPTED, "interrupted")
