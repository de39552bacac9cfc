"""Writes the samples of an attempt, and keeps their files small."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

from launcher.plan.paths import RunPaths
from launcher.report.samples import NodeUseSample, ProgressSample, Sample, TaskUseSample, kind_of, render_sample
from launcher.tasks import TaskId
from worker_entry.protocol.file_names import make_private_directory

LIMIT = 12 << 20
"""Bytes at which a file is thinned. A step a second for a week is 60 MB otherwise."""
RECENT = 0.25
"""The share of a file, at its end, that is not thinned."""
PROGRESS_S = 1.0
"""How often a task's progress is written down."""


class SampleFiles:
    """The files of one attempt. A disk that is full costs samples, never the run."""

    def __init__(self, files: RunPaths, attempt: int, limit: int = LIMIT) -> None:
        self._files = files
        self._attempt = attempt
        self._limit = limit
        self._sizes: dict[Path, int] = {}
        self._written: dict[TaskId, ProgressSample] = {}

    def write_progress(self, task: TaskId, sample: ProgressSample) -> None:
        """Appends how far the task is, if it has got on and the last line is not of the same second."""
        last = self._written.get(task)
        if last is None or (sample.step != last.step and sample.time - last.time >= PROGRESS_S):
            self._written[task] = sample
            self._append(self._files.samples(self._attempt, task), sample)

    def write_use(self, task: TaskId, sample: TaskUseSample) -> None:
        self._append(self._files.samples(self._attempt, task), sample)

    def write_node(self, sample: NodeUseSample) -> None:
        self._append(self._files.node_samples(self._attempt), sample)

    def _append(self, path: Path, sample: Sample) -> None:
        line = render_sample(sample)
        with contextlib.suppress(OSError):
            if path not in self._sizes:  # of other machines, nothing may have been written here yet
                make_private_directory(str(path.parent))
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if path not in self._sizes:
                    self._sizes[path] = os.fstat(descriptor).st_size
                self._sizes[path] += os.write(descriptor, line)
            finally:
                os.close(descriptor)
            if self._sizes[path] > self._limit:
                thin(path)
                self._sizes[path] = path.stat().st_size


def thin(path: Path) -> None:
    """Removes every second line of each kind from the older part of a file of samples.

    Raises:
        OSError: the file cannot be replaced; it stays as it is.
    """
    data = path.read_bytes()
    end = data.rfind(b"\n", 0, int(len(data) * (1 - RECENT))) + 1
    counts: Counter[str] = Counter()
    kept = []
    for line in data[:end].splitlines(keepends=True):
        kind = kind_of(line)
        counts[kind] += 1
        if counts[kind] % 2:
            kept.append(line)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.writelines(kept)
            stream.write(data[end:])
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
