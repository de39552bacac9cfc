"""Reads everything that a run's page shows. The folder may be a copy, half-written, or hold foreign files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.pages.page_data import LogEnd, NodeSamples, PageData, TaskSamples
from launcher.plan.paths import RunPaths
from launcher.report.models import AttemptReport, RunReport
from launcher.report.run_events import AttemptEnded, NodeMet, Record, parse_records
from launcher.report.run_report import make_versions
from launcher.report.samples import NodeUseSample, ProgressSample, Sample, TaskUseSample, kind_of, parse_samples
from launcher.report.status_report import RunStatus
from launcher.rundir.directory import RunDir
from launcher.rundir.journal_reading import open_regular
from launcher.rundir.last_state import read_end_report
from launcher.rundir.log_tails import last_lines
from launcher.rundir.logs import find_attempts, find_logs
from launcher.rundir.record import read_limited, read_object, read_record
from launcher.rundir.summary import RunSummary, summarize
from launcher.tasks import TaskId, parse_task_id

TEXT_LIMIT = 8 << 20
JOURNAL_HEAD, JOURNAL_TAIL = 8 << 20, 40 << 20
"""Bytes read at the start and at the end of a very long journal."""
SAMPLES_LIMIT = 256 << 20
"""Bytes read of all sample files together, the latest attempts first."""
SAMPLES_OF_FILE = 24 << 20
LINES_OF_KIND = 20_000
"""Samples read from one file for each kind and node; longer series are thinned to every second or third sample."""
NODE_WITHIN = 400
"""The first bytes of a line, which contain the node's name."""

LOGS = 64
LINES = 40
LINES_OF_EARLIER = 15
EARLIER = 20
"""Earlier attempts whose failed task's log is shown."""

_NODE = re.compile(rb'"node":("(?:[^"\\]|\\.)*")')
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def read_page_data(
    files: RunDir, *, now: float, report: RunReport | None = None, status: RunStatus | None = None
) -> PageData:
    """Reads a run.

    Args:
        files: the run's folder.
        now: Unix seconds.
        report: the report of a run that is just ending; otherwise, the report is read from the folder.
        status: the status from the controller of a running run.

    Raises:
        RunDirectoryError: the folder is not a run's folder.
    """
    record = read_record(files)
    summary = summarize(files) if report is None else None
    running = summary is not None and summary.running
    if summary is not None and not running:
        report = read_end_report(files, summary)
    records, skipped = _read_journal(files)
    if report is not None:
        attempts: Sequence[AttemptReport] = report.attempts
    else:
        attempts = [each.event.report for each in records if isinstance(each.event, AttemptEnded)]
    tasks, nodes = _read_samples(files)
    met = [each.event.ready for each in records if isinstance(each.event, NodeMet)]
    return PageData(
        run_id=record.run_id,
        name=report.name if report is not None else record.name,
        directory=str(files.root),
        state=_find_state(report, status, summary),
        running=running,
        started=report.started if report is not None else record.started,
        ended=None if running else report.ended if report is not None else summary.ended if summary else None,
        now=now,
        report=report,
        status=status,
        attempts=attempts,
        records=records,
        skipped=skipped,
        tasks=tasks,
        nodes=nodes,
        logs=_read_logs(files, attempts),
        plan=read_object(files.plan, TEXT_LIMIT),
        spec=_read_text(files.spec),
        stacks=_read_text(files.stacks),
        command=record.command,
        cwd=record.cwd,
        versions=report.versions if report is not None else make_versions(met),
    )


def _find_state(report: RunReport | None, status: RunStatus | None, summary: RunSummary | None) -> str:
    if report is not None:
        return report.outcome
    if status is not None:
        return status.state
    return summary.state if summary is not None else ""


def _read_journal(files: RunPaths) -> tuple[list[Record], bool]:
    """Returns the records, and whether some were skipped."""
    try:
        with os.fdopen(open_regular(files.events), "rb") as file:
            head = file.read(JOURNAL_HEAD + JOURNAL_TAIL)
            size = os.fstat(file.fileno()).st_size
            is_long = size > len(head)
            tail = b""
            if is_long:
                head = head[:JOURNAL_HEAD]
                file.seek(max(size - JOURNAL_TAIL, len(head)))
                tail = file.read(JOURNAL_TAIL)
    except OSError:
        return [], False
    return [*parse_records([*head.split(b"\n"), *tail.split(b"\n")[1:]])], is_long


def _read_samples(files: RunPaths) -> tuple[list[TaskSamples], list[NodeSamples]]:
    tasks: list[TaskSamples] = []
    nodes: list[NodeSamples] = []
    left = SAMPLES_LIMIT
    for attempt in reversed(find_attempts(files)):
        for path in sorted(files.attempt(attempt).glob("*.samples.jsonl")):
            task = _task_of(path)
            if (task is None and path != files.node_samples(attempt)) or left <= 0:
                continue
            try:
                data = read_limited(path, SAMPLES_OF_FILE)[0]
            except (OSError, ValueError):
                continue
            left -= len(data)
            samples = [*parse_samples(_spread(data.splitlines()))]
            if task is not None:
                tasks.append(_make_task(attempt, task, samples))
            else:
                nodes += _make_nodes(attempt, samples)
    return sorted(tasks, key=lambda each: (parse_task_id(each.task), each.attempt)), sorted(
        nodes, key=lambda each: each.attempt
    )


def _task_of(path: Path) -> TaskId | None:
    try:
        return parse_task_id(path.name.removesuffix(".samples.jsonl").replace("-", ":", 1))
    except ValueError:
        return None


def _spread(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Yields the lines; thins a kind or a node with too many lines to every second or third line."""
    keys = [_key_of(line) for line in lines]
    counts = Counter(keys)
    seen: Counter[bytes] = Counter()
    for key, line in zip(keys, lines, strict=True):
        if seen[key] % (counts[key] // LINES_OF_KIND + 1) == 0:
            yield line
        seen[key] += 1


def _key_of(line: bytes) -> bytes:
    """The key of a line's series: the kind, and the node if the line names one."""
    node = _NODE.search(line, 0, NODE_WITHIN)
    return kind_of(line).encode() + (node[1] if node is not None else b"")


def _make_task(attempt: int, task: TaskId, samples: Sequence[Sample]) -> TaskSamples:
    return TaskSamples(
        attempt=attempt,
        task=str(task),
        progress=[each for each in samples if isinstance(each, ProgressSample)],
        use=[each for each in samples if isinstance(each, TaskUseSample)],
    )


def _make_nodes(attempt: int, samples: Sequence[Sample]) -> list[NodeSamples]:
    uses = [each for each in samples if isinstance(each, NodeUseSample)]
    names = dict.fromkeys(each.node for each in uses)
    return [NodeSamples(attempt=attempt, node=name, use=[each for each in uses if each.node == name]) for name in names]


def _read_logs(files: RunPaths, attempts: Sequence[AttemptReport]) -> list[LogEnd]:
    """The logs of the last attempt, starting with the blamed task, and of the tasks that broke earlier attempts."""
    last = max(find_attempts(files), default=0)
    blamed = {attempt.attempt: attempt.verdict.task for attempt in attempts}
    found = find_logs(files.attempt(last)) if last else {}
    ends = [_read_end(files, last, str(task), path, LINES) for task, path in found.items()]
    ends = sorted(ends, key=lambda end: end.task != blamed.get(last))[:LOGS]
    for attempt in [each for each in reversed(attempts) if each.attempt != last][:EARLIER]:
        for task, path in find_logs(files.attempt(attempt.attempt)).items():
            if str(task) == attempt.verdict.task:
                ends.append(_read_end(files, attempt.attempt, str(task), path, LINES_OF_EARLIER))
    agent = _read_end(files, 0, "agent", files.agent_errors, LINES_OF_EARLIER)
    return [*ends, *([agent] if agent.lines else [])]


def _read_end(files: RunPaths, attempt: int, task: str, path: Path, lines: int) -> LogEnd:
    shown = last_lines(path, lines) if path.is_file() else []  # opening a named pipe would wait for a writer
    return LogEnd(attempt, task, files.relative(path), [_COLOUR.sub("", line) for line in shown])


def _read_text(path: Path) -> str:
    try:
        return read_limited(path, TEXT_LIMIT)[0].decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return ""
