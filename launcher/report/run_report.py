"""Makes the report of a run from its finished attempts."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata

from launcher.errors import (
    EXIT_BUG,
    EXIT_INFRASTRUCTURE,
    EXIT_NO_PROGRESS,
    EXIT_USAGE,
    DistlaunchError,
    InterruptionError,
    as_ours,
)
from launcher.gang.checks.findings import SpeedReport
from launcher.gang.events import TaskExited, TaskReported
from launcher.gang.restarts import FRUITLESS
from launcher.gang.state import AttemptState
from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.plan.tf_config import format_address
from launcher.report.goodput import Goodput
from launcher.report.models import (
    AttemptReport,
    CollectedNode,
    CompileCacheReport,
    CrashReport,
    FaultReport,
    LeftOutAttempts,
    ProgressReport,
    RunReport,
    TaskReport,
    WarmNode,
)
from launcher.tasks import TaskId
from launcher.verdict.causes import was_stopped
from launcher.verdict.judge import exit_status, outcome
from launcher.verdict.models import OutcomeName, Verdict
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass, replace
from worker_entry.protocol.messages import Ready
from worker_entry.protocol.values import CrashRecord, TaskExit

FIRST_KEPT = 20
RECENT_KEPT = 79
"""The report has this many first and recent attempts before the last in full, and counts the verdicts of the others."""
REFERENCES_KEPT = 50
"""The most different references to count: some come from nodes, and a broken node may send a new one each time."""


@dataclass(frozen=True)
class Attempt:
    """A finished attempt.

    `started`, `ended` and `last_progress` are Unix seconds; `logs` are relative to the run's directory.
    """

    number: int
    state: AttemptState
    plan: LaunchPlan
    verdict: Verdict
    started: float
    ended: float
    logs: Mapping[TaskId, str]
    last_progress: float | None = None
    cache: CompileCacheReport | None = None


@dataclass(frozen=True)
class RunEnd:
    """The end of a run outside its attempts."""

    verdict: Verdict
    exit_status: int
    outcome: OutcomeName = "failed"


def end_by_error(error: Exception, ignored: Sequence[str] = ()) -> RunEnd:
    """The end of a run by an error of distlaunch itself; `ignored`: events that may explain a bug."""
    error = as_ours(error)
    if isinstance(error, InterruptionError):
        return RunEnd(Verdict(reference=error.reference, message=error.message), error.exit_status, "interrupted")
    if isinstance(error, DistlaunchError):
        verdict = Verdict(
            reference=error.reference, message=error.message, evidence=list(error.evidence), hint=error.hint
        )
        return RunEnd(verdict, error.exit_status)
    verdict = Verdict(reference="bug", message=f"a bug in distlaunch: {error!r}", evidence=[*ignored])
    return RunEnd(verdict, EXIT_BUG)


def end_by_signal(signum: int) -> RunEnd:
    """The end of a run by a signal in the pause after an attempt."""
    message = f"interrupted by {TaskExit(signal=signum)} before the next attempt"
    return RunEnd(Verdict(reference="interrupted", message=message), 128 + signum, "interrupted")


def end_without_progress(last: Verdict) -> RunEnd:
    """The end of a run whose attempts fail without a new checkpoint; `last`: the verdict on the last attempt."""
    message = f"{count_of(FRUITLESS, 'attempt')} in a row saved no checkpoint; the last one: {last.message}"
    return RunEnd(last.model_copy(update={"reference": "no-progress", "message": message}), EXIT_NO_PROGRESS)


@dataclass(frozen=True)
class Earlier:
    """The reports of the attempts before the last; their size is bounded even if a run restarts for ever."""

    first: tuple[AttemptReport, ...] = ()
    recent: tuple[AttemptReport, ...] = ()
    left_out: LeftOutAttempts | None = None

    def add(self, report: AttemptReport) -> Earlier:
        """Returns the reports with the latest attempt added."""
        if len(self.first) < FIRST_KEPT:
            return replace(self, first=(*self.first, report))
        if len(self.recent) < RECENT_KEPT:
            return replace(self, recent=(*self.recent, report))
        gone, *recent = self.recent
        references = Counter(self.left_out.references if self.left_out is not None else ())
        known = gone.verdict.reference in references or len(references) < REFERENCES_KEPT
        references[gone.verdict.reference if known else "other"] += 1
        left_out = LeftOutAttempts(first=FIRST_KEPT + 1, last=gone.attempt, references=references)
        return Earlier(self.first, (*recent, report), left_out)


def make_run_report(
    attempts: Sequence[Attempt],
    *,
    earlier: Earlier = Earlier(),  # noqa: B008 - it is frozen
    run_id: str,
    name: str,
    directory: str,
    started: float,
    ended: float,
    left: Mapping[str, int | None],
    versions: Mapping[str, str],
    end: RunEnd | None = None,
    chaos: Sequence[FaultReport] = (),
    goodput: Goodput | None = None,
    pods_left: int | None = None,
    speed: SpeedReport | None = None,
    kept_warm: Sequence[WarmNode] = (),
    collected: Sequence[CollectedNode] = (),
) -> RunReport:
    """Makes the report of a finished run.

    Args:
        attempts: the last attempt, preceded by those that are not in `earlier`, in order.
        earlier: the attempts before `attempts`.
        run_id: the run's name.
        name: the cluster's name.
        directory: the folder of the run's files.
        started: when the run began, in Unix seconds.
        ended: when none of its processes was left, agents included.
        left: the number of processes left on each node at the end; None if unknown.
        versions: the versions of distlaunch, Python and TensorFlow.
        end: the end of the run, if the last attempt did not end it.
        chaos: the faults that were injected on purpose.
        kept_warm: the processes that stay on the nodes for the next run.
        collected: the files that came to the run's folder.
        pods_left: the number of the run's pods that are left; None if unknown, or if it made none.
        speed: the results of the speed check.
    """
    if end is None:
        last = attempts[-1]
        end = RunEnd(last.verdict, exit_status(last.state, last.verdict), outcome(last.state))
    after_start = bool(earlier.first) or any(attempt.state.started for attempt in attempts)
    for attempt in attempts[:-1]:
        earlier = earlier.add(make_attempt_report(attempt))
    reports = [*earlier.first, *earlier.recent, *(_attempt_report(attempt, left) for attempt in attempts[-1:])]
    return RunReport(
        run_id=run_id,
        name=name,
        outcome=end.outcome,
        # EXIT_USAGE promises that nothing was started.
        exit_status=EXIT_INFRASTRUCTURE if after_start and end.exit_status == EXIT_USAGE else end.exit_status,
        versions=dict(versions),
        directory=directory,
        started=started,
        ended=ended,
        verdict=end.verdict,
        attempts=reports,
        speed=speed,
        left_out=earlier.left_out,
        chaos=list(chaos),
        goodput=goodput,
        pods_left=pods_left,
        kept_warm=list(kept_warm),
        collected=list(collected),
    )


def make_attempt_report(attempt: Attempt) -> AttemptReport:
    """The report of an attempt that another attempt follows; its agents have stayed."""
    return _attempt_report(attempt, _left_after(attempt.state))


def _left_after(state: AttemptState) -> dict[str, int | None]:
    """Processes left after an attempt, as reported by agents that stay for the next attempt."""
    return {node: 0 if node in state.empty or node not in state.ready else None for node in state.policy.nodes}


def _attempt_report(attempt: Attempt, left: Mapping[str, int | None]) -> AttemptReport:
    state = attempt.state
    opened = [event.time for event in state.listening.values()]
    return AttemptReport(
        attempt=attempt.number,
        started=attempt.started,
        ended=attempt.ended,
        cluster_up=max(opened) if opened and state.listening.keys() >= state.policy.forming else None,
        last_progress=attempt.last_progress,
        tasks=[_task_report(state, task, attempt.logs[task.task]) for task in attempt.plan.tasks],
        verdict=attempt.verdict,
        processes_left=None if None in left.values() else sum(filter(None, left.values())),
        unverified=[node for node, count in left.items() if count is None],
        left_behind=sum(event.left_behind for event in state.empty.values()),
        killed=sum(event.killed for event in state.empty.values()),
        divergence=state.divergence,
        compile_cache=attempt.cache,
    )


def make_versions(nodes: Iterable[Ready]) -> dict[str, str]:
    """The versions of distlaunch, Python and TensorFlow."""
    versions = {"distlaunch": metadata.version("distlaunch"), "python": platform.python_version()}
    for ready in nodes:
        if ready.tensorflow is not None:
            versions.setdefault("tensorflow", ready.tensorflow)
    return versions


def _task_report(state: AttemptState, plan: TaskPlan, log: str) -> TaskReport:
    started = state.started.get(plan.task)
    opened = state.listening.get(plan.task)
    ended: TaskExited | None = state.exits.get(plan.task)
    how = ended.exit if ended is not None else TaskExit()
    return TaskReport(
        task=str(plan.task),
        node=plan.node,
        address=format_address(plan.address, plan.port),
        unguarded=state.unguarded.get(plan.task),
        pid=started.pid if started else None,
        started=started.time if started else None,
        port_opened=opened.time if opened else None,
        ended=ended.time if ended else None,
        exit_code=how.code,
        exit_signal=how.signal,
        core_dumped=how.core_dumped,
        finished=ended is not None and not ended.failed,
        stopped_by_us=ended is not None and was_stopped(state, ended),
        crash=_crash_report(ended.crash) if ended is not None and ended.crash is not None else None,
        progress=_progress_report(state.status.get(plan.task)),
        log=log,
    )


def _progress_report(status: TaskReported | None) -> ProgressReport | None:
    progress = status.progress if status is not None else None
    if progress is None or progress.first_step is None:
        return None
    return ProgressReport(
        epoch=progress.epoch,
        first_epoch=progress.first_epoch,
        step=progress.step,
        first_step=progress.first_step,
        began=progress.began,
        step_s=progress.step_s,
        own_s=progress.own_s,
        data_s=progress.data_s,
        metrics=progress.metrics,
    )


def _crash_report(crash: CrashRecord) -> CrashReport:
    return CrashReport(
        time=crash.time,
        exception=crash.exception,
        message=crash.message,
        file=crash.file,
        line=crash.line,
        thread=crash.thread,
    )
