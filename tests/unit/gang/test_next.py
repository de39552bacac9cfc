"""What follows an attempt, from what is known: another attempt, a wait, another turn of the job, or the end."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from launcher.gang.events import EndAnnounced
from launcher.gang.restarts import (
    Again,
    AttemptOutcome,
    End,
    Next,
    Requeue,
    Restart,
    Situation,
    WaitForNodes,
    decide_next,
)
from launcher.spec.parts import RestartSpec

KILLED = AttemptOutcome("task-killed", 0.0, 100.0, trained=True)
RESTARTS, NONE = RestartSpec(max_restarts=2), RestartSpec()
PREEMPTED = EndAnnounced("preempted", message="Slurm preempts the job")
CANCELLED = EndAnnounced("interrupted", message="the job was cancelled")
TERM = signal.SIGTERM
LATER = f"not started again now: {PREEMPTED.message}"
TOO_FEW = "not started again: no spare node fits, and too few nodes are left"


def after(spec: RestartSpec = RESTARTS, **known: Any) -> Next:
    return decide_next(spec, [KILLED], Situation(**{"failed": True, **known}))


def test_a_success_ends_the_run() -> None:
    assert after(failed=False, asked=TERM, announced=PREEMPTED) == End()


def test_a_failure_is_followed_by_another_attempt_if_the_spec_allows() -> None:
    assert after() == Again(Restart(0.0, 1, free=False))
    assert after(NONE) == End()


@pytest.mark.parametrize("more", [{}, {"has_nodes": False}, {"is_taken_away": True}, {"announced": PREEMPTED}])
def test_a_request_to_stop_ends_the_run_whatever_else_is_known(more: dict[str, Any]) -> None:
    assert after(asked=TERM, **more) == End(signal=TERM)


def test_a_run_that_may_not_restart_ends_with_its_failure_and_not_with_a_later_request() -> None:
    assert after(NONE, asked=TERM) == End()


def test_a_run_whose_nodes_are_taken_away_continues_later_if_it_may_restart() -> None:
    assert after(is_taken_away=True) == Requeue()
    assert after(NONE, is_taken_away=True) == End()


def test_nodes_that_are_taken_away_between_two_attempts_end_the_run_for_now() -> None:
    assert after(announced=PREEMPTED) == Requeue(LATER)
    assert after(announced=CANCELLED) == End("not started again now: the job was cancelled", signal=TERM)


def test_lost_nodes_are_waited_for_once_if_the_spec_says_how_long() -> None:
    patient = RestartSpec(max_restarts=2, return_s=30.0)
    assert after(patient, has_nodes=False) == WaitForNodes(30.0)
    assert after(patient, has_nodes=False, has_waited=True) == End(TOO_FEW)
    assert after(RestartSpec(max_restarts=2, return_s=0.0), has_nodes=False) == End(TOO_FEW)


def test_an_attempt_that_was_not_taken_over_is_followed_by_one_on_its_nodes_that_counts_as_none() -> None:
    free = Again(Restart(0.0, 0, free=True), reuses_nodes=True)
    assert after(is_lost_earlier=True) == after(NONE, is_lost_earlier=True) == free
    assert after(NONE, is_lost_earlier=True, asked=TERM) == End()


def test_a_run_that_makes_no_progress_says_so() -> None:
    saved = AttemptOutcome("task-killed", 0.0, 100.0, trained=True, saved=True, step=10)
    stuck = [AttemptOutcome("task-killed", 0.0, 100.0, trained=True, step=5)] * 3
    step = decide_next(RestartSpec(max_restarts=9), [saved, *stuck], Situation(failed=True))
    assert isinstance(step, End)
    assert step.fruitless
    assert step.reason.startswith("not started again: the last 3 attempts saved no checkpoint")
