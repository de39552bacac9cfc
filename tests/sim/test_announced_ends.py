"""Slurm or Kubernetes reclaims nodes: how long tasks may still run, and how the run's end is reported."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.gang.events import EndAnnounced
from launcher.gang.restarts import AttemptOutcome
from launcher.gang.state import Phase
from launcher.report.models import RunReport
from launcher.rundir.history import History
from launcher.sources.base import NodeSource
from tests.harness.builders.announced_ends import CANCELLED, MEMORY, PREEMPTED
from tests.sim.clock import BEGAN
from tests.sim.nodes import At, Deed, Exit, FakeAgent, FakeRun, Steps, both, say
from worker_entry.protocol.messages import Signalled
from worker_entry.protocol.values import TaskExit

# --- whole runs ---


class TakesAway(NodeSource):
    """A source of nodes that always announces this end."""

    def __init__(self, end: EndAnnounced | None) -> None:
        self.end = end

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
        return self.end

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        answer(self.end)


def run_in_job(
    folder: Path, end: EndAnnounced | None, spec: dict[str, object], *endings: AttemptOutcome
) -> tuple[RunReport, bool]:
    """A run in which one node gets a signal; returns its report, and whether it continues later."""
    steps = [Steps(f"worker:{index}", 1, 5) for index in (0, 1)]
    run = FakeRun(
        folder / "run", [*steps, At(Phase.RUNNING, say(Signalled(BEGAN)))], {"timeouts": {"lease_s": 60}, **spec}
    )
    run.context = replace(run.context, source=TakesAway(end))
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
def test_a_run_that_loses_its_nodes_continues_later_if_restarts_remain(
    tmp_path: Path, end: EndAnnounced, restarts: int, reference: str, later: bool
) -> None:
    report, goes_on = run_in_job(tmp_path, end, {"restart": {"max_restarts": restarts}})
    assert (report.verdict.reference, goes_on) == (reference, later)
    assert len(report.attempts) == 1
    assert report.outcome == ("interrupted" if reference == "interrupted" else "failed")


def test_a_run_is_not_requeued_after_three_attempts_without_a_checkpoint(tmp_path: Path) -> None:
    saved = AttemptOutcome("preempted", 1.0, 9.0, trained=True, saved=True, step=50)
    fruitless = AttemptOutcome("preempted", 1.0, 9.0, trained=True, step=20)
    restart: dict[str, object] = {"restart": {"max_restarts": 100}}
    report, goes_on = run_in_job(tmp_path / "1", PREEMPTED, restart, saved, fruitless, fruitless)
    assert (report.verdict.reference, report.exit_status, goes_on) == ("no-progress", 93, False)
    report, goes_on = run_in_job(tmp_path / "2", PREEMPTED, restart, saved, fruitless)
    assert (report.verdict.reference, report.exit_status, goes_on) == ("preempted", 1, True)


class Announces(TakesAway):
    """A source that announces its end when the test calls `put`, and reports no end before."""

    put: Callable[[EndAnnounced], None]

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        self.put = put

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
        return None


def run_killed_once(folder: Path, source: TakesAway, during: Callable[[FakeRun], None]) -> tuple[RunReport, bool]:
    """A run whose first attempt fails, and which calls `during` in the pause; returns the same as `run_in_job`."""
    kill = Exit("worker:1", TaskExit(None, signal.SIGKILL), 20.0)
    spec: dict[str, object] = {"restart": {"max_restarts": 2}, "timeouts": {"lease_s": 60}}
    run = FakeRun(folder / "run", [Steps("worker:1", 1, 5), kill], spec)
    run.context = replace(run.context, source=source)
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
def test_an_end_announced_between_two_attempts_takes_effect(
    tmp_path: Path, end: EndAnnounced, attempts: int, later: bool, outcome: str
) -> None:
    source = Announces(None)
    report, goes_on = run_killed_once(tmp_path, source, lambda _: source.put(end))
    assert (len(report.attempts), goes_on, report.outcome) == (attempts, later, outcome)


def test_a_node_signalled_between_attempts_ends_the_next_attempt_as_preempted(tmp_path: Path) -> None:
    source = TakesAway(None)

    def signal_node(run: FakeRun) -> None:
        source.end = PREEMPTED
        run.context.links.put(("gpu-b", Signalled(BEGAN)))

    report, goes_on = run_killed_once(tmp_path, source, signal_node)
    assert [attempt.verdict.reference for attempt in report.attempts] == ["task-killed", "preempted"]
    assert goes_on


@pytest.mark.parametrize("before", [(), (say(Signalled(BEGAN)),)], ids=["alone", "after a signal"])
def test_a_user_stop_takes_precedence_over_an_announced_preemption(tmp_path: Path, before: tuple[Deed, ...]) -> None:
    """`down` near the end of a Slurm job: the run does not continue, and the job is not queued again."""
    runs: list[FakeRun] = []

    def request_stop(_: FakeAgent) -> bool:
        runs[0]._interrupts.ask(signal.SIGTERM)
        return True

    spec: dict[str, object] = {"restart": {"max_restarts": 2}, "timeouts": {"lease_s": 60}}
    deed = At(Phase.RUNNING, both(*before, request_stop))
    runs.append(run := FakeRun(tmp_path / "run", [Steps("worker:0", 1, 5), deed], spec))
    run.context = replace(run.context, source=TakesAway(PREEMPTED))
    supervisor = run.supervisor()
    report = run._within_signals(supervisor.run)
    assert (report.outcome, len(report.attempts), supervisor.continues_later) == ("interrupted", 1, False)
