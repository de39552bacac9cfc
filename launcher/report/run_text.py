"""A run's report as text: the error of an attempt, and the last lines of the run."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from launcher.errors import error_lines
from launcher.report.goodput import SHORT_S, Goodput, render_goodput
from launcher.report.models import AttemptReport, CollectedNode, RunReport, TaskReport
from launcher.tasks import name_tasks, parse_task_id
from launcher.verdict.models import Verdict
from launcher.wording import count_of, render_age, render_duration
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import TaskExit

SHOWN_TASKS = 12
"""With more tasks, the summary has a line for each end instead of one for each task."""
NAMED_TASKS = 6
"""Such a line names at most this many tasks."""
SHOWN_ATTEMPTS = 20
"""The most attempts before the last that get a line each in the summary."""

LONG_S, MOST = 120.0, 0.9
"""An uninterrupted run gets a line about its goodput if it took longer than LONG_S and trained for less than MOST."""

TAIL_LINES = 10
"""The last log lines of a failed task that its error shows."""


def render_error(verdict: Verdict, tail: Sequence[str] = ()) -> str:
    """`Error: … [reference]`, the evidence, the log's last lines and the hint; no character moves the cursor."""
    evidence = [*verdict.evidence, *(f"  {verdict.task} │ {line}" for line in tail)]
    lines = error_lines(verdict.message, verdict.reference, evidence, verdict.hint)
    return "\n".join(lines)


def render_summary(report: RunReport, *, written: bool = True, page: str = "") -> str:
    """The last lines of a run: each task's end, the outcome, the time, the files.

    Args:
        report: the report of a run with at least one attempt.
        written: whether the report was written.
        page: the path of the run's page, if it was written.
    """
    attempt = report.attempts[-1]
    lines = []
    if any(task.started is not None for task in attempt.tasks):
        lines += _render_ends(attempt)
    lines += _render_left(report) if _has_met(report) else []
    lines += _render_collected(report)
    lines += _render_kept(report)
    lines += _render_cache(attempt)
    lines += [f"  {attempt.divergence}"] if attempt.divergence else []
    if len(report.attempts) > 1:
        lines.append(f"  {attempt.attempt:,} attempts; before the last one:")
        lines += _render_earlier(report)
    lines += [f"  Chaos: {fault.message}" for fault in report.chaos]
    if report.goodput is not None and _is_worth_a_line(report, report.goodput):
        lines.append(f"  {render_goodput(report.goodput)}")
    outcome = render_outcome(report)
    if report.outcome == "succeeded":
        lines.append(f"{outcome[:1].upper()}{outcome[1:]}: {attempt.verdict.message}")
        lines += [f"  {line}" for line in attempt.verdict.evidence]
    else:
        lines.append(f"{outcome[:1].upper()}{outcome[1:]}")
    lines.append(f"Logs: {report.directory}{' · page: distlaunch report' if written and not page else ''}")
    lines += [f"Open in a browser: {page}"] if page else []
    return "\n".join(lines)


def render_outcome(report: RunReport) -> str:
    """`succeeded in 3 s`, `failed after 3 s, exit status 1`."""
    took = render_duration(report.ended - report.started)
    if report.outcome == "succeeded":
        return f"succeeded in {took}"
    return f"{report.outcome} after {took}, exit status {report.exit_status}"


def _is_worth_a_line(report: RunReport, goodput: Goodput) -> bool:
    """Whether training was interrupted, or was not most of a run that took minutes."""
    if report.ended - report.started < SHORT_S:
        return False
    interrupted_s = goodput.lost_s + goodput.restarting_s + goodput.stalled_s + goodput.waiting_s
    return interrupted_s > 0 or (goodput.share < MOST and report.ended - report.started > LONG_S)


def _render_ends(attempt: AttemptReport) -> list[str]:
    """A line for each task or, if there are many, for each end with the tasks that ended so."""
    servers_done = attempt.verdict.reference == "succeeded"
    ends = {task.task: _render_server_end(task) if servers_done else render_end(task) for task in attempt.tasks}
    if len(ends) <= SHOWN_TASKS:
        width = max(map(len, ends))
        return [f"  {task:<{width}}  {end}" for task, end in ends.items()]
    return [f"  {line}" for line in group_by_end(ends)]


def group_by_end(ends: Mapping[str, str]) -> list[str]:
    """`worker:7: exit status 1`, `63 tasks: exit status 0`: the tasks with each end or state, the fewest first."""
    tasks: dict[str, list[str]] = {}
    for task, end in ends.items():
        tasks.setdefault(end, []).append(task)
    few = sorted(tasks.items(), key=lambda item: len(item[1]))
    return [f"{_name_tasks(names, len(ends))}: {end}" for end, names in few]


def _name_tasks(names: Sequence[str], count: int) -> str:
    if len(names) > NAMED_TASKS or len(names) == count:
        return count_of(len(names), "task")
    return name_tasks(map(parse_task_id, names))


def _render_server_end(task: TaskReport) -> str:
    """The end of a task in a run that succeeded; a stopped task has served its purpose."""
    if task.stopped_by_us and task.ended is not None and task.task.partition(":")[0] != "chief":
        return "stopped: training has finished"
    return render_end(task)


def _render_earlier(report: RunReport) -> list[str]:
    """A line for each attempt but the last; if there are many, a single line for those in the middle."""
    lines = [f"    {each.attempt}: {each.verdict.message} [{each.verdict.reference}]" for each in report.attempts[:-1]]
    if len(lines) <= SHOWN_ATTEMPTS:
        return lines
    half = SHOWN_ATTEMPTS // 2
    references = Counter(each.verdict.reference for each in report.attempts[half : -half - 1])
    references.update(report.left_out.references if report.left_out is not None else {})
    counts = ", ".join(f"{count:,} {reference}" for reference, count in references.most_common())
    return [*lines[:half], f"    … {references.total():,} more: {counts}", *lines[-half:]]


def _has_met(report: RunReport) -> bool:
    """Whether a node was reached; otherwise, nothing can be left there."""
    not_taken_over = report.verdict.reference == "node-unreachable" and not any(
        task.started for each in report.attempts for task in each.tasks
    )
    return not not_taken_over or any(each.unverified for each in report.attempts)


def _render_left(report: RunReport) -> list[str]:
    attempt = report.attempts[-1]
    nodes = {task.node for each in report.attempts for task in each.tasks}
    unverified = attempt.unverified
    verified = len(nodes - {*unverified})
    where = "this machine" if nodes == {"local"} else count_of(verified, "node")
    pods = f", {count_of(report.pods_left, 'pod')} left" if report.pods_left is not None else ""
    if not unverified:
        count = count_of(attempt.processes_left or 0, "process", "processes")
        return [f"  {count} left on {where}{_render_cleaning(attempt)}{pods}"]
    lines = [f"  0 processes left on {where}{_render_cleaning(attempt)}{pods}"] if verified else []
    lines.append(f"  processes left on {', '.join(unverified)}: unknown; once reachable, run:")
    return [*lines, f"    distlaunch clean {shlex.quote(report.directory)}"]


def _render_collected(report: RunReport) -> list[str]:
    """How many files came from the nodes, and what is missing."""
    if not report.collected:
        return []
    files = sum(node.files for node in report.collected if not node.problem)
    size = sum(node.bytes for node in report.collected if not node.problem)
    lines = [f"  collected: {count_of(files, 'file')}, {render_size(size)}, in collected/"] if files else []
    missing = [f"  {line}" for line in render_missing(report.collected)]
    if not missing:
        return lines
    return [*lines, *missing, f"    distlaunch collect {shlex.quote(report.directory)}  # continues"]


def render_missing(collected: Iterable[CollectedNode]) -> list[str]:
    """The nodes whose files are not here, and why."""
    return [f"not collected from {node.node}: {node.problem}" for node in collected if node.problem]


def _render_kept(report: RunReport) -> list[str]:
    """The line about processes that stay on purpose."""
    if not report.kept_warm:
        return []
    count = sum(len(kept.pids) for kept in report.kept_warm)
    size = sum(kept.bytes for kept in report.kept_warm)
    where = "" if len(report.kept_warm) == 1 else f" on {len(report.kept_warm)} nodes"
    until = render_age(math.ceil(max(kept.until for kept in report.kept_warm) - report.ended))
    kept = count_of(count, "process", "processes")
    return [f"  kept warm for {until}{where}: {kept}, {render_size(size)}; `distlaunch down --warm` stops them"]


def _render_cache(attempt: AttemptReport) -> list[str]:
    cache = attempt.compile_cache
    if cache is None:
        return []
    return [f"  compile cache: {count_of(cache.loaded, 'entry', 'entries')} loaded, {cache.stored} added"]


def _render_cleaning(attempt: AttemptReport) -> str:
    if not attempt.left_behind:
        return ""
    if attempt.left_behind == 1:
        return " (1 process that outlived its task was stopped)"
    return f" ({attempt.left_behind} processes that outlived their task were stopped)"


def render_end(task: TaskReport) -> str:
    """`exit status 1`, and whether distlaunch stopped the task."""
    if task.started is None:
        return "not started"
    if task.ended is None:
        return "end not observed"
    how = str(TaskExit(task.exit_code, task.exit_signal, task.core_dumped))
    if not task.stopped_by_us:
        return how
    raised = task.crash is not None and task.crash.thread is None and task.crash.exception != "SystemExit"
    return f"{f'raised {task.crash.exception}; ' if task.crash and raised else ''}{how}, stopped by distlaunch"
