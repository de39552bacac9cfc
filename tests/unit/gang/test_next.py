"""What follows an attempt: another attempt, a wait for nodes, a requeue of the job, or the end."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from launcher.gang.events import EndAnnounced
from launcher.gang.restarts import (
    FRUITLESS,
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
from worker_entry.protocol.frozen import replace

KILLED = AttemptOutcome("task-killed", 0.0, 100.0, trained=True)
RESTARTS, NONE = RestartSpec(max_restarts=2), RestartSpec()
PREEMPTED = EndAnnounced("preempted", message="Slurm preempts the job")
CANCELLED = EndAnnounced("interrupted", message="the job was cancelled")
TERM = signal.SIGTERM
LATER = f"not started again now: {PREEMPTED.message}"
TOO_FEW = "not started again: no spare node fits, and too few nodes are left"


def after(spec: RestartSpec = RESTARTS, **known: Any) -> Next:
    return decide_next(spec, [KILLED], Situation(**{"failed": True, **known}))


def test_a_successful_attempt_ends_the_run() -> None:
    assert after(failed=False, asked=TERM, announced=PREEMPTED) == End()


def test_a_failed_attempt_is_restarted_if_the_spec_allows() -> None:
    assert after() == Again(Restart(0.0, 1, free=False))
    assert after(NONE) == End()


@pytest.mark.parametrize("more", [{}, {"has_nodes": False}, {"is_taken_away": True}, {"announced": PREEMPTED}])
def test_a_stop_request_after_a_failure_ends_the_run_in_every_situation(more: dict[str, Any]) -> None:
    assert after(asked=TERM, **more) == End(signal=TERM)


def test_a_run_without_restarts_ends_with_its_failure_despite_a_stop_request() -> None:
    assert after(NONE, asked=TERM) == End()


def test_a_run_that_lost_its_allocation_is_requeued_if_restarts_are_allowed() -> None:
    assert after(is_taken_away=True) == Requeue()
    assert after(NONE, is_taken_away=True) == End()
    stuck = [replace(KILLED, saved=True), *[replace(KILLED, reference="preempted")] * FRUITLESS]
    end = decide_next(RestartSpec(max_restarts=9), stuck, Situation(failed=True, is_taken_away=True))
    assert end == End("not started again: the last 3 attempts saved no checkpoint and got no further", fruitless=True)


def test_an_announcement_between_attempts_requeues_a_preempted_run_and_ends_a_cancelled_one() -> None:
    assert after(announced=PREEMPTED) == Requeue(LATER)
    assert after(announced=CANCELLED) == End("not started again now: the job was cancelled", signal=TERM)


def test_the_run_waits_at_most_once_for_lost_nodes() -> None:
    patient = RestartSpec(max_restarts=2, return_s=30.0)
    assert after(patient, has_nodes=False) == WaitForNodes(30.0)
    assert after(patient, has_nodes=False, has_waited=True) == End(TOO_FEW)
    assert after(RestartSpec(max_restarts=2, return_s=0.0), has_nodes=False) == End(TOO_FEW)


def test_a_failed_takeover_is_followed_by_an_uncounted_restart_on_the_same_nodes() -> None:
    free = Again(Restart(0.0, 0, free=True), reuses_nodes=True)
    assert after(is_lost_earlier=True) == after(NONE, is_lost_earlier=True) == free
    assert after(NONE, is_lost_earlier=True, asked=TERM) == End()


def test_a_run_ends_as_fruitless_after_three_attempts_without_a_checkpoint() -> None:
    saved = AttemptOutcome("task-killed", 0.0, 100.0, trained=True, saved=True, step=10)
    stuck = [AttemptOutcome("task-killed", 0.0, 100.0, trained=True, step=5)] * 3
    step = decide_next(RestartSpec(max_restarts=9), [saved, *stuck], Situation(failed=True))
    assert isinstance(step, End)
    assert step.fruitless
    assert step.reason.startswith("not started again: the last 3 attempts saved no checkpoint")
