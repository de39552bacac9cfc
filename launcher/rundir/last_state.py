"""The last known state of a run that no longer has a controller: from its report, or else from its journal."""

from __future__ import annotations

import functools
import json

from launcher.gang.facts import apply
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState
from launcher.plan.paths import RunPaths
from launcher.report.models import RunReport, TaskReport
from launcher.report.run_text import render_end
from launcher.report.status_report import PlacedTask, RunStatus, TaskState, describe_task
from launcher.rundir.history import History, read_history
from launcher.rundir.record import FILE_LIMIT, RecordedRun, read_limited, read_record
from launcher.rundir.summary import RunSummary
from launcher.spec.strategies import RULES
from worker_entry.system import clock


def read_end_report(files: RunPaths, summary: RunSummary) -> RunReport | None:
    """The report of the end that the summary shows.

    None if there is no such report: the disk was full, or the report is of an earlier end, before the run was resumed.

    Raises:
        RunDirectoryError: the folder is not a run's folder.
    """
    try:
        report = RunReport.read(json.loads(read_limited(files.report, FILE_LIMIT)[0]))
    except (OSError, ValueError):
        return None
    start = read_record(files)
    is_old = start.generation > 0 and report.ended < start.started
    return None if is_old or report.outcome != summary.state else report


def read_last_status(files: RunPaths, summary: RunSummary) -> RunStatus:
    """The status of a run that is over, or whose controller is gone."""
    report = read_end_report(files, summary)
    if report is None:
        history = read_history(files)
        attempt, tasks = history.attempt, _read_tasks(files, history)
    elif report.attempts:
        last = report.attempts[-1]
        attempt, tasks = last.attempt, [_describe_ended(task) for task in last.tasks]
    else:
        attempt, tasks = 0, []
    return RunStatus(
        run_id=summary.run_id,
        name=report.name if report is not None else summary.run_id,
        directory=str(files.root),
        state=summary.state,
        attempt=attempt,
        restarts=max(attempt - 1, 0),
        started=report.started if report is not None else summary.started,
        now=clock.now(),
        ended=report.ended if report is not None else summary.ended or summary.started,
        tasks=tasks,
        nodes=[],
        goodput=report.goodput if report is not None else None,
    )


def _read_tasks(files: RunPaths, history: History) -> list[TaskState]:
    """The tasks of the last attempt: as they ended, or as last seen."""
    if history.attempts and not history.is_open:
        return [_describe_ended(task) for task in history.attempts[-1].tasks]
    plan = RecordedRun(files).plan
    rules = next((rules for name, rules in RULES.items() if name == plan.strategy), None)
    if rules is None:  # not written completely, or not by distlaunch
        return []
    tasks = [PlacedTask(each.task, each.node, each.address) for each in plan.tasks]
    nodes = {node: frozenset(each.task for each in tasks if each.node == node) for node in {t.node for t in tasks}}
    policy = AttemptPolicy(nodes, frozenset(), 0, 0, 0, strategy=rules)
    state = functools.reduce(apply, history.events, AttemptState(policy))
    return [describe_task(state, task) for task in tasks]


def _describe_ended(task: TaskReport) -> TaskState:
    progress = task.progress
    return TaskState(
        task=task.task,
        node=task.node,
        state=render_end(task),
        address=task.address,
        unguarded=task.unguarded,
        pid=task.pid,
        epoch=progress.epoch if progress is not None else None,
        step=progress.step if progress is not None else None,
        step_s=progress.step_s if progress is not None else None,
        own_s=progress.own_s if progress is not None else None,
        metrics=progress.metrics if progress is not None else {},
        gpus=[],
    )
