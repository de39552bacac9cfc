"""Which tasks count for what: trainers decide, servers serve them, and the others only watch."""

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
    return [TaskReported(task, "trains", 1000.0, Progress(done, 1, done, 1000.0, 1001.0)) for task in tasks]  # type: ignore[arg-type]  # tasks of this module


def of(*events: Event | float) -> AttemptState:
    policy = make_policy(APART)
    return play(policy, *running(policy), *events)[0]


class TestProgress:
    def test_of_an_evaluator_does_not_hide_that_the_training_hangs(self) -> None:
        policy = make_policy(APART)
        state, _ = play(policy, *running(policy), *steps(W0, W1))
        actions = []
        for number in range(1, 40):
            events = (TaskWrote(EVALUATOR), *steps(EVALUATOR, done=number))
            state, performed = play_on(state, 10.0 * number, *events, Tick())
            actions += performed
        assert AskStacks() in actions
        assert state.reason is Reason.STALLED

    def test_of_an_evaluator_does_not_make_the_usual_step_longer(self) -> None:
        slow = TaskReported(EVALUATOR, "trains", 1000.0, Progress(2, 1, 2, 1000.0, 9000.0))
        state = of(*steps(W0, W1), slow, LEAST_S + 1, Tick())
        assert state.suspicion is Reason.STALLED

    def test_is_that_of_any_trainer(self) -> None:
        state = of(*steps(W0, W1), 100.0, *steps(W0, done=10), LEAST_S + 1, Tick())
        assert state.suspicion is None


class TestANode:
    @pytest.mark.parametrize("what", [NodeLost("c", "gone"), NodeRefused("c", REFUSED.problems)])
    def test_of_an_evaluator_alone_is_not_needed(self, what: Event) -> None:
        state = of(what)
        assert (state.phase, state.reason) == (Phase.RUNNING, None)
        state, _ = play_on(state, exited(W0), exited(W1))
        assert state.reason is (Reason.SUCCEEDED if isinstance(what, NodeLost) else None)

    def test_that_is_not_needed_is_named_when_it_is_lost(self) -> None:
        before = of()
        event = NodeLost("c", "gone")
        after, _ = decide(before, event, 0.0)
        assert render_news(before, after, event) == "Node c was lost: gone; the training does not need it"

    @pytest.mark.parametrize("what", [NodeLost("b", "gone"), NodeRefused("b", REFUSED.problems)])
    def test_whose_trainer_has_ended_is_not_needed(self, what: Event) -> None:
        assert of(exited(W1), what).reason is None
        assert of(what).reason is not None

    def test_that_is_announced_to_go_does_not_matter_if_it_is_not_needed(self) -> None:
        assert of(replace(TAKEN, node="c")).reason is None
        later = of(replace(TAKEN, node="c"), replace(TAKEN, node="b"))
        assert later.reason is Reason.ANNOUNCED

    def test_counts_before_the_start_whatever_it_is_for(self) -> None:
        policy = make_policy(APART)
        state, _ = play(policy, *running(policy)[:4], NodeLost("c", "gone"))
        assert state.reason is Reason.NODE_LOST


class TestOnceAllTrainersHaveSucceeded:
    """An evaluator drains, or TensorBoard is kept."""

    @pytest.mark.parametrize("lost", ["a", "b", "c"])
    def test_a_lost_node_changes_nothing(self, lost: str) -> None:
        policy = replace(make_policy({"a": [W0, TENSORBOARD], "b": [W1], "c": [EVALUATOR]}), keeps_auxiliary=True)
        state, _ = play(policy, *running(policy), exited(W0), exited(W1), NodeLost(lost, "gone"))
        assert state.reason in (None, Reason.SUCCEEDED)
        assert not state.failures

    @pytest.mark.parametrize(
        "end",
        [Interrupted(signal.SIGINT), Interrupted(signal.SIGTERM), TAKEN, EndAnnounced("interrupted", "cancelled")],
    )
    def test_every_end_is_a_success(self, end: Event) -> None:
        state = of(exited(W0), exited(W1), end)
        assert state.reason is Reason.SUCCEEDED
        assert (outcome(state), exit_status(state, judged(state)), judged(state).reference) == (
            "succeeded",
            0,
            "succeeded",
        )

    def test_slurms_signal_before_its_words_does_not_delay_the_end(self) -> None:
        state = of(exited(W0), exited(W1), NodeSignalled("a", 1010.0), TAKEN)
        assert state.reason is Reason.SUCCEEDED
        assert state.deadline is not None
        assert state.deadline < 60

    def test_an_interruption_before_is_an_interruption(self) -> None:
        state = of(exited(W0), Interrupted(signal.SIGINT))
        assert (state.reason, outcome(state)) == (Reason.INTERRUPTED, "interrupted")
