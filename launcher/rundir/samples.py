"""Writes the samples of an attempt, and keeps their files small."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from launcher.plan.paths import RunPaths
from launcher.report.samples import NodeUseSample, ProgressSample, Sample, TaskUseSample, render_sample
from launcher.tasks import TaskId
from worker_entry.protocol.file_names import make_private_directory

LIMIT = 12 << 20
"""Bytes at which a file is thinned. Without thinning, one step per second takes 180 MB in a week."""
HARD_LIMIT = 1.5
"""A file that cannot be thinned, for example on a full disk, grows at most to this multiple of the limit."""
AGAIN = 0.1
"""After thinning, or a failure to thin, the file may grow by this fraction of the limit before the next attempt."""
PROGRESS_S = 1.0
"""How often a task's progress is written."""
RECENT = 0.25
"""The share of a file, at its end, that is not thinned."""
SHORTEST_S = 4.0
"""The least interval between older samples; it is doubled until they are small enough."""
LONGEST_S = 1e9
_HEAD = re.compile(rb'\{"sample":"([a-z]+)","time":([0-9.e+-]+)(?:,"node":("(?:[^"\\]|\\.)*"))?[,}].*\}\n')
"""A line of `render_sample`, with its kind, its time, and its node if it has one."""


class SampleFiles:
    """The sample files of one attempt. A full disk costs samples, but never fails the run."""

    def __init__(self, files: RunPaths, attempt: int, limit: int = LIMIT) -> None:
        self._files = files
        self._attempt = attempt
        self._limit = limit
        self._open: dict[Path, SampleFile] = {}
        self._written: dict[TaskId, ProgressSample] = {}
        self._unwritten: dict[TaskId, ProgressSample] = {}
        """The last progress of tasks, if it has not been written."""

    def write_progress(self, task: TaskId, sample: ProgressSample, *, is_last: bool = False) -> None:
        """Appends the task's progress, if the step has changed and the last line is at least a second old.

        `is_last`: whether training has ended, so that no later sample can take the place of this one.
        """
        last = self._written.get(task)
        if last is not None and sample.step == last.step:
            self._unwritten.pop(task, None)
        elif last is None or is_last or sample.time - last.time >= PROGRESS_S:
            self._write(task, sample)
        else:
            self._unwritten[task] = sample

    def write_epoch(self, task: TaskId, sample: ProgressSample) -> None:
        """Appends the end of an epoch."""
        self._write(task, sample)

    def write_last(self, task: TaskId) -> None:
        """Appends the last progress of a task that reports no more, if it has not been written."""
        if (sample := self._unwritten.get(task)) is not None:
            self._write(task, sample)

    def _write(self, task: TaskId, sample: ProgressSample) -> None:
        self._unwritten.pop(task, None)
        self._written[task] = sample
        self._append(self._files.samples(self._attempt, task), sample)

    def write_use(self, task: TaskId, sample: TaskUseSample) -> None:
        self._append(self._files.samples(self._attempt, task), sample)

    def write_node(self, sample: NodeUseSample) -> None:
        self._append(self._files.node_samples(self._attempt), sample)

    def wait(self) -> None:
        """Waits until no file is being thinned."""
        for file in self._open.values():
            file.wait()

    def _append(self, path: Path, sample: Sample) -> None:
        if path not in self._open:
            self._open[path] = SampleFile(path, self._limit)
        self._open[path].append(render_sample(sample))


class SampleFile:
    """A sample file; a separate thread thins it when it has grown beyond `limit` bytes.

    Thinning takes a fifth of a second, too long for the run's own thread.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path = path
        self._limit = self._thin_at = limit
        self._size: int | None = None
        self._torn = False
        """Whether the last line is incomplete: a disk was full, or a controller was killed."""
        self._lock = threading.Lock()
        """Held while a line is written, and while a thinned file takes the file's place."""
        self._thread: threading.Thread | None = None

    def append(self, line: bytes) -> None:
        """Writes a line; drops it if the file cannot be written or has reached the hard limit."""
        with contextlib.suppress(OSError), self._lock:
            if self._size is None:
                self._begin()
            if self._size is not None and self._size < self._limit * HARD_LIMIT:
                self._write(line)
        if (self._size or 0) > self._thin_at and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._thin, name="thin-samples")
            with contextlib.suppress(RuntimeError):  # no thread can be started now; perhaps later
                self._thread.start()

    def wait(self) -> None:
        """Waits until the file is not being thinned."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    @property
    def _temporary(self) -> Path:
        return self._path.with_name(f".{self._path.name}.thinned")

    def _begin(self) -> None:
        """Reads the state of the file that an earlier controller may have left."""
        make_private_directory(str(self._path.parent))  # missing if no task of this machine has written yet
        self._temporary.unlink(missing_ok=True)
        self._size = 0
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as stream:
            self._size = stream.seek(0, os.SEEK_END)
            stream.seek(max(self._size - 1, 0))
            self._torn = stream.read(1) not in (b"", b"\n")

    def _write(self, line: bytes) -> None:
        assert self._size is not None
        if self._torn:
            line = b"\n" + line
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            written = os.write(descriptor, line)
        finally:
            os.close(descriptor)
        self._size += written
        self._torn = written < len(line) and (written > 0 or self._torn)

    def _thin(self) -> None:
        """Runs in the thread: writes a thinned copy next to the file, then replaces the file with the copy."""
        assert self._size is not None
        try:
            with self._path.open("rb") as source, self._open_temporary() as target:
                target.write(thin_lines(source.read(self._size), self._limit // 2))
                target.flush()
                os.fsync(target.fileno())  # otherwise, a crash of the machine may lose both files
                with self._lock:
                    target.write(source.read())
                    target.flush()
                    self._temporary.replace(self._path)
                    self._size = target.tell()
            self._thin_at = max(self._limit, int(self._size + AGAIN * self._limit))
        except (OSError, MemoryError):
            with contextlib.suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            self._thin_at = int(self._size + AGAIN * self._limit)

    def _open_temporary(self) -> BinaryIO:
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "wb")


def thin_lines(data: bytes, size: int) -> bytes:
    """Returns the lines of a file of samples, in order; reduces the older part to at most `size` bytes if possible.

    Of each kind and node, the older part keeps the first sample of every 4, 8, 16… seconds. Torn or malformed lines in
    it are removed.
    """
    end = data.rfind(b"\n", 0, int(len(data) * (1 - RECENT))) + 1
    lines = [*_parse(data[:end].splitlines(keepends=True))]
    interval_s = SHORTEST_S
    while sum(len(line) for _, _, line in lines) > size and interval_s < LONGEST_S:
        last: dict[bytes, int] = {}
        kept = []
        for key, time, line in lines:
            interval = int(time // interval_s)
            if last.get(key) != interval:
                last[key] = interval
                kept.append((key, time, line))
        lines, interval_s = kept, 2 * interval_s
    return b"".join(line for _, _, line in lines) + data[end:]


def _parse(lines: Iterable[bytes]) -> Iterable[tuple[bytes, float, bytes]]:
    """Yields the kind and node of each line's sample, its time, and the line."""
    for line in lines:
        found = _HEAD.fullmatch(line)
        if found is None:
            continue
        try:
            time = float(found[2])
        except ValueError:
            continue
        if math.isfinite(time):
            yield found[1] + (found[3] or b""), time, line
