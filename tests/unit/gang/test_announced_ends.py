"""An engine takes nodes away: how long tasks may still run, and how the run's end is reported."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from launcher.gang.decide import FAILURE_GRACE_S, SIGNALLED_GRACE_S, STOP_MARGIN_S
from launcher.gang.events import Action, EndAnnounced, Event, NodeEmpty, NodeLost, NodeSignalled, StopNodes
from launcher.gang.restarts import Ending
from launcher.gang.state import AttemptState, Phase, Reason
from launcher.report.models import AttemptReport, RunReport
from launcher.report.run_events import AttemptEnded
from launcher.rundir.history import History, read_history
from launcher.rundir.journal import Journal
from launcher.sources.slurm import SlurmEngine
from launcher.verdict.judge import outcome
from launcher.verdict.models import Verdict
from tests.harness.gang import TWO_NODES, W0, W1, make_policy, play, running
from tests.harness.verdicts import ended, failed, judged, status_of
from tests.sim.clock import BEGAN
from tests.sim.nodes import At, Deed, Exit, FakeAgent, FakeRun, Steps, both, say
from worker_entry.protocol.messages import Signalled
from worker_entry.protocol.values import TaskExit

PREEMPTED = EndAnnounced("preempted", "Slurm preempted job 7", ("its words",), 20.0)
CANCELLED = EndAnnounced("interrupted", "job 7 was cancelled", (), 20.0)
NOTHING = EndAnnounced("")
MEMORY = EndAnnounced("out-of-memory", "job 7 exceeded its memory limit", ("its words",), stays=True)
TERM = NodeSignalled("a", 1050.0)


def ending(*events: Event | float) -> tuple[AttemptState, list[Action]]:
    """A gang on two nodes after these events, and its actions since it was running."""
    policy = make_policy(TWO_NODES)
    state, actions = play(policy, *running(policy), *events)
    return state, actions[2:]


def over(*events: Event | float) -> AttemptState:
    return ending(*events, NodeEmpty("a"), NodeEmpty("b"))[0]


def test_after_a_signal_no_task_is_killed_before_slurm_has_said_when_it_will() -> None:
    _, actions = ending(TERM, ended(W0, 1050.1, 143), PREEMPTED)
    assert actions == [StopNodes(SIGNALLED_GRACE_S), StopNodes(PREEMPTED.grace_s)]


def test_an_announcement_alone_stops_the_tasks_with_its_grace() -> None:
    state, actions = ending(PREEMPTED)
    assert (state.phase, state.reason, actions) == (Phase.STOPPING, Reason.ANNOUNCED, [StopNodes(20.0)])
    assert state.deadline == pytest.approx(20.0 + STOP_MARGIN_S, abs=1)


def test_a_signal_without_an_announced_end_is_an_ordinary_failure() -> None:
    state, actions = ending(TERM, ended(W0, 1050.1, 143), NOTHING)
    assert actions == [StopNodes(SIGNALLED_GRACE_S), StopNodes(FAILURE_GRACE_S)]
    assert state.announced is None
    assert ending(TERM, NOTHING, ended(W0, 1051.0, 143))[1] == [StopNodes(FAILURE_GRACE_S)]


def test_an_announcement_does_not_lengthen_a_grace() -> None:
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
def test_ends_of_tasks_after_slurms_signal_count_as_the_announced_end(events: tuple[Event, ...]) -> None:
    state = over(*events)
    verdict = judged(state)
    assert (verdict.reference, verdict.message) == ("preempted", "Slurm preempted job 7")
    assert verdict.evidence[0] == "its words"
    assert (outcome(state), status_of(state)) == ("failed", 1)


def test_a_program_that_failed_before_is_the_cause() -> None:
    assert judged(over(failed(W0, 1020.0), TERM, PREEMPTED)).reference == "task-failed"


def test_a_cancelled_job_is_an_interruption() -> None:
    state = over(TERM, ended(W0, 1050.1, 143), CANCELLED, ended(W1, 1050.2, 143))
    assert (judged(state).reference, outcome(state), status_of(state)) == ("interrupted", "interrupted", 143)


def test_the_announced_end_of_a_single_step_stops_nothing_by_itself() -> None:
    assert ending(MEMORY)[1] == []
    state = over(MEMORY, ended(W0, 1050.0, by=signal.SIGKILL))
    assert judged(state).reference == "out-of-memory"
    assert not state.is_taken_away


def test_endings_are_known_to_the_controller_after_a_requeue(tmp_path: Path) -> None:
    endings = [
        Ending("preempted", 1.0, 9.0, trained=True, saved=saved, step=step) for saved, step in ((True, 5), (False, 5))
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
    assert read_history(tmp_path / "events.jsonl").endings == tuple(endings)


# --- whole runs ---


class TakesAway:
    """An engine that always announces this end."""

    def __init__(self, end: EndAnnounced | None) -> None:
        self.end = end

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        pass

    def close(self) -> None:
        pass

    def forget(self) -> None:
        pass

    def find_end(self, lost: Collection[str]) -> EndAnnounced | None:
        return self.end

    def release(self) -> int | None:
        return None

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        answer(self.end)


def run_in_job(
    folder: Path, end: EndAnnounced | None, spec: dict[str, object], *endings: Ending
) -> tuple[RunReport, bool]:
    """A run in which one node gets a signal; returns its report, and whether it continues later."""
    steps = [Steps(f"worker:{index}", 1, 5) for index in (0, 1)]
    run = FakeRun(
        folder / "run", [*steps, At(Phase.RUNNING, say(Signalled(BEGAN)))], {"timeouts": {"lease_s": 60}, **spec}
    )
    run.context = replace(run.context, engine=cast("SlurmEngine", TakesAway(end)))
    run.history = History(endings=endings)
    supervisor = run.supervisor()
    return run._within_signals(supervisor.run), supervisor.continues_later


@pytest.mark.parametrize(
    ("end", "restarts", "reference", "later"),
    [
        (PREEMPTED, 1, "preempted", True),
        (PREEMPTED, 0, "preempted", False),
        (CANCELLED, 1, "interrupted", False),
        (EndAnnounced("node-lost", "Slurm lost a node of job 7", (), 20.0), 1, "node-lost", True),
    ],
)
def test_a_run_without_its_nodes_continues_later_if_restarts_allow(
    tmp_path: Path, end: EndAnnounced, restarts: int, reference: str, later: bool
) -> None:
    report, goes_on = run_in_job(tmp_path, end, {"restart": {"max_restarts": restarts}})
    assert (report.verdict.reference, goes_on) == (reference, later)
    assert len(report.attempts) == 1
    assert report.outcome == ("interrupted" if reference == "interrupted" else "failed")


def test_a_run_that_saves_nothing_over_several_turns_is_not_queued_again(tmp_path: Path) -> None:
    saved = Ending("preempted", 1.0, 9.0, trained=True, saved=True, step=50)
    fruitless = Ending("preempted", 1.0, 9.0, trained=True, step=20)
    restart: dict[str, object] = {"restart": {"max_restarts": 100}}
    report, goes_on = run_in_job(tmp_path / "1", PREEMPTED, restart, saved, fruitless, fruitless)
    assert (report.verdict.reference, report.exit_status, goes_on) == ("no-progress", 93, False)
    report, goes_on = run_in_job(tmp_path / "2", PREEMPTED, restart, saved, fruitless)
    assert (report.verdict.reference, report.exit_status, goes_on) == ("preempted", 1, True)


class Announces(TakesAway):
    """An engine that announces its end when it is told to, and knows nothing before."""

    put: Callable[[EndAnnounced], None]

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        self.put = put

    def find_end(self, lost: Collection[str]) -> EndAnnounced | None:
        return None


def run_killed_once(folder: Path, engine: TakesAway, during: Callable[[FakeRun], None]) -> tuple[RunReport, bool]:
    """A run whose first attempt fails, and where something happens `during` the pause; returns as `run_in_job`."""
    kill = Exit("worker:1", TaskExit(None, signal.SIGKILL), 20.0)
    spec: dict[str, object] = {"restart": {"max_restarts": 2}, "timeouts": {"lease_s": 60}}
    run = FakeRun(folder / "run", [Steps("worker:1", 1, 5), kill], spec)
    run.context = replace(run.context, engine=cast("SlurmEngine", engine))
    supervisor = run.supervisor()
    pause = supervisor._pauses.pause

    def pause_and_happen(seconds: float) -> None:
        during(run)
        pause(max(seconds, 40.0))

    supervisor._pauses.pause = pause_and_happen  # type: ignore[method-assign]  # the moment matters
    return run._within_signals(supervisor.run), supervisor.continues_later


@pytest.mark.parametrize(
    ("end", "attempts", "later", "outcome"),
    [(PREEMPTED, 1, True, "failed"), (CANCELLED, 1, False, "interrupted"), (MEMORY, 2, False, "succeeded")],
)
def test_an_end_that_is_announced_between_two_attempts_is_not_forgotten(
    tmp_path: Path, end: EndAnnounced, attempts: int, later: bool, outcome: str
) -> None:
    engine = Announces(None)
    report, goes_on = run_killed_once(tmp_path, engine, lambda _: engine.put(end))
    assert (len(report.attempts), goes_on, report.outcome) == (attempts, later, outcome)


def test_a_node_that_is_signalled_between_two_attempts_ends_the_next_one(tmp_path: Path) -> None:
    engine = TakesAway(None)

    def signal_node(run: FakeRun) -> None:
        engine.end = PREEMPTED
        run.context.links.put(("gpu-b", Signalled(BEGAN)))

    report, goes_on = run_killed_once(tmp_path, engine, signal_node)
    assert [attempt.verdict.reference for attempt in report.attempts] == ["task-killed", "preempted"]
    assert goes_on


@pytest.mark.parametrize("before", [(), (say(Signalled(BEGAN)),)], ids=["alone", "after a signal"])
def test_a_request_to_stop_is_the_users_whatever_the_engine_says(tmp_path: Path, before: tuple[Deed, ...]) -> None:
    """`down` near the end of a Slurm job: the run does not continue, and the job is not queued again."""
    runs: list[FakeRun] = []

    def request_stop(_: FakeAgent) -> bool:
        runs[0]._interrupts.ask(signal.SIGTERM)
        return True

    spec: dict[str, object] = {"restart": {"max_restarts": 2}, "timeouts": {"lease_s": 60}}
    deed = At(Phase.RUNNING, both(*before, request_stop))
    runs.append(run := FakeRun(tmp_path / "run", [Steps("worker:0", 1, 5), deed], spec))
    run.context = replace(run.context, engine=cast("SlurmEngine", TakesAway(PREEMPTED)))
    supervisor = run.supervisor()
    report = run._within_signals(supervisor.run)
    assert (report.outcome, len(report.attempts), supervisor.continues_later) == ("interrupted", 1, False)
