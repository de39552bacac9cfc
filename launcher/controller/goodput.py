"""Counts the goodput of a run while it is running, including the records of earlier controllers."""

from __future__ import annotations

import threading

from launcher.plan.paths import RunPaths
from launcher.report.goodput import Goodput
from launcher.report.goodput_count import GoodputCount
from launcher.report.run_events import AttemptEnded, Record, RunStarted
from launcher.report.samples import ProgressSample, parse_samples
from launcher.rundir.journal import Journal
from launcher.rundir.record import RecordedRun
from launcher.spec.models import ClusterSpec
from launcher.tasks import TaskId
from worker_entry.protocol.values import Progress


class GoodputWatch:
    """A goodput count for all threads of the controller."""

    def __init__(self, count: GoodputCount) -> None:
        self._count = count
        self._lock = threading.Lock()

    def note(self, record: Record) -> None:
        """Counts the next record of the journal."""
        with self._lock:
            self._count.note(record)

    def note_progress(self, task: TaskId, progress: Progress) -> None:
        """Counts the progress of a task of the current attempt."""
        with self._lock:
            self._count.note_progress(task, progress)

    def count(self, now: float) -> Goodput:
        """The goodput up to now; `now`: Unix seconds."""
        with self._lock:
            return self._count.count(now)


def watch_goodput(files: RunPaths, journal: Journal, started: float, spec: ClusterSpec) -> GoodputWatch:
    """Counts from the journal's first record on, including the records of earlier controllers.

    Args:
        files: the run's folder.
        journal: this controller's journal, which appends to the same file.
        started: when the run began, in Unix seconds.
        spec: says which tasks' steps and ends count.
    """
    watch = GoodputWatch(count_recorded(files, started, spec))
    journal.listen(watch.note)
    return watch


def count_recorded(files: RunPaths, started: float, spec: ClusterSpec) -> GoodputCount:
    """Counts the records in a run's folder; ignores torn lines and unknown kinds."""
    count = GoodputCount(started, spec.rules.decides)
    for record in RecordedRun(files).read_records():
        if isinstance(record.event, (AttemptEnded, RunStarted)):
            _note_samples(count, files, record.time)
        count.note(record)
    _note_samples(count, files, float("inf"))
    return count


def _note_samples(count: GoodputCount, files: RunPaths, until: float) -> None:
    """Counts the progress of the running attempt up to `until`."""
    if count.guide is None:
        return
    attempt, task = count.guide
    try:
        lines = files.samples(attempt, task).read_bytes().splitlines()
    except OSError:
        return
    for sample in parse_samples(lines):
        if isinstance(sample, ProgressSample) and sample.time <= until:
            count.note_sample(task, sample)
