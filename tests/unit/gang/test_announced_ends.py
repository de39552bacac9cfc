"""An engine reclaims nodes: how long tasks may still run, and how the run's end is reported."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launcher.gang.decide import FAILURE_GRACE_S, SIGNALLED_GRACE_S, STOP_MARGIN_S
from launcher.gang.events import Action, EndAnnounced, Event, NodeEmpty, NodeLost, NodeSignalled, StopNodes
from launcher.gang.restarts import AttemptOutcome
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.plan.paths import RunPaths
from launcher.report.models import AttemptReport
from launcher.report.run_events import AttemptEnded
from launcher.rundir.history import read_history
from launcher.rundir.journal import Journal
from launcher.verdict.judge import outcome
from launcher.verdict.models import Verdict
from tests.harness.builders.announced_ends import CANCELLED, MEMORY, PREEMPTED
from tests.harness.builders.gang import TWO_NODES, W0, W1, make_policy, play, running
from tests.harness.builders.verdicts import ended, failed, judged, status_of

NOTHING = EndAnnounced("")
TERM = NodeSignalled("a", 1050.0)


def ending(*events: Event | float) -> tuple[AttemptState, list[Action]]:
    """A gang on two nodes after these events, and its actions since it was running."""
    policy = make_policy(TWO_NODES)
    state, actions = play(policy, *running(policy), *events)
    return state, actions[2:]


def over(*events: Event | float) -> AttemptState:
    return ending(*events, NodeEmpty("a"), NodeEmpty("b"))[0]


def test_tasks_keep_a_long_grace_after_a_signal_until_slurm_announces_its_limit() -> None:
    state, actions = ending(TERM, ended(W0, 1050.1, 143))
    assert actions == [StopNodes(SIGNALLED_GRACE_S)]
    assert state.deadline == SIGNALLED_GRACE_S + STOP_MARGIN_S
    state, actions = ending(TERM, ended(W0, 1050.1, 143), PREEMPTED)
    assert actions == [StopNodes(SIGNALLED_GRACE_S), StopNodes(PREEMPTED.grace_s)]
    assert state.deadline == PREEMPTED.grace_s + STOP_MARGIN_S


def test_an_announced_end_stops_the_tasks_with_the_announced_grace() -> None:
    state, actions = ending(PREEMPTED)
    assert (state.phase, state.reason, actions) == (Phase.STOPPING, Reason.ANNOUNCED, [StopNodes(20.0)])
    assert state.deadline == pytest.approx(20.0 + STOP_MARGIN_S, abs=1)


def test_a_node_signal_without_an_announced_end_is_an_ordinary_failure() -> None:
    state, actions = ending(TERM, ended(W0, 1050.1, 143), NOTHING)
    assert actions == [StopNodes(SIGNALLED_GRACE_S), StopNodes(FAILURE_GRACE_S)]
    assert state.announced is None
    assert ending(TERM, NOTHING, ended(W0, 1051.0, 143))[1] == [StopNodes(FAILURE_GRACE_S)]


def test_an_announced_end_does_not_extend_a_running_grace() -> None:
    assert ending(failed(W0, 1050.0), PREEMPTED)[1] == [StopNodes(FAILURE_GRACE_S)]


@pytest.mark.parametrize(
    "events",
    [
        (PREEMPTED, ended(W0, 1060.0, 42), ended(W1, 1060.0, 42)),
        (TERM, ended(W0, 1050.0, 143), PREEMPTED, ended(W1, 1051.0, 143)),
        (TERM, ended(W0, 1050.1, by=signal.SIGTERM), ended(W1, 1050.1, by=signal.SIGTERM), PREEMPTED),
        (TERM, failed(W0, 1052.0, raised=1051.0), PREEMPTED, ended(W1, 1060.0, by=signal.SIGKILL)),
        (NodeLost("b", "srun ended"), PREEMPTED),
        (PREEMPTED, NodeLost("b", "srun ended")),
    ],
)
def test_task_ends_after_a_slurm_signal_are_judged_as_a_preemption(events: tuple[Event, ...]) -> None:
    state = over(*events)
    verdict = judged(state)
    assert (verdict.reference, verdict.message) == ("preempted", "Slurm preempted job 7")
    assert verdict.evidence[0] == "its words"
    assert (outcome(state), status_of(state)) == ("failed", 1)


def test_a_program_that_failed_before_a_preemption_is_the_cause() -> None:
    assert judged(over(failed(W0, 1020.0), TERM, PREEMPTED)).reference == "task-failed"


def test_a_cancelled_slurm_job_counts_as_an_interruption() -> None:
    state = over(TERM, ended(W0, 1050.1, 143), CANCELLED, ended(W1, 1050.2, 143))
    assert (judged(state).reference, outcome(state), status_of(state)) == ("interrupted", "interrupted", 143)


def test_an_out_of_memory_announcement_stops_nothing_by_itself() -> None:
    assert ending(MEMORY)[1] == []
    state = over(MEMORY, ended(W0, 1050.0, by=signal.SIGKILL))
    assert judged(state).reference == "out-of-memory"
    assert not state.is_taken_away


def test_a_requeued_controller_reads_earlier_attempt_outcomes_from_the_journal(tmp_path: Path) -> None:
    endings = [
        AttemptOutcome("preempted", 1.0, 9.0, trained=True, saved=saved, step=step)
        for saved, step in ((True, 5), (False, 5))
    ]
    journal = Journal(tmp_path / "events.jsonl", lambda: 1.0)
    for number, each in enumerate(endings, 1):
        report = AttemptReport(
            attempt=number,
            started=1.0,
            ended=9.0,
            verdict=Verdict(reference="preempted", message="x"),
            tasks=[],
            processes_left=0,
        )
        journal.write(AttemptEnded(report, each))
    journal.close()
    assert read_history(RunPaths(tmp_path)).endings == tuple(endings)
