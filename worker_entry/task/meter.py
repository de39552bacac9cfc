"""Counts training steps and reports them through the task's status file.

`keras_progress` counts the steps of `model.fit`; a program's own loop calls `worker_entry.progress.report`.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Optional

from worker_entry.hooks.remote_values import has_ended, is_done
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import EPOCH_ENDS, EpochEnd, Progress
from worker_entry.system import clock
from worker_entry.task.intervals import Intervals
from worker_entry.task.metrics import MetricReader
from worker_entry.task.status_file import StatusFile

REPORT_S = 0.5
"""The interval between reports of progress."""
MEASURE_S = 1.0
"""The shortest time that a measurement of steps covers, and the interval between readings of metrics, which may wait
for a device."""
BLOCK_LIMIT_S = 0.2
"""The longest time that a report may block the program, to wait for a concurrent report or for a metric."""
IN_FLIGHT = 1000
"""Maximum number of unfinished scheduled steps that one check covers: workers do the steps nearly in order."""

Watcher = Callable[[Progress], None]
Recorder = Callable[[Optional[int], Optional[int], dict[str, Any]], None]
"""Gets the step, the epoch and the metrics."""


class Meter:
    """Counts the steps of this process, and reports them from a separate thread.

    A step only increments counters: writing a file would release the GIL, which costs a tenth of a short step.

    `waited` returns the seconds that this process has waited for the other workers so far, and `awaited_data` the
    seconds that it has waited for its input; each returns None if the time is unknown.
    """

    def __init__(
        self,
        status: StatusFile,
        waited: Callable[[], Optional[float]],
        awaited_data: Callable[[], Optional[float]] = lambda: None,
    ) -> None:
        self._status = status
        self._waited = waited
        self._awaited_data = awaited_data
        self._training = False
        self._epoch: Optional[int] = None
        self._first_epoch: Optional[int] = None
        self._step = self._first_step = self._batches = 0
        self._began = self._time = 0.0
        self._total_steps: Optional[int] = None
        self._total_epochs: Optional[int] = None
        self._resumed: Optional[int] = None
        self._step_s: Optional[float] = None
        self._own_s: Optional[float] = None
        self._data_s: Optional[float] = None
        self._intervals = Intervals()
        self._p99_s: Optional[float] = None
        self._noted = (0, 0.0)
        """How many batches the intervals cover so far, and when the last of them was done."""
        self._metrics = MetricReader()
        self._ended = 0
        """The step at the last end of an epoch."""
        self._epoch_ends: deque[EpochEnd] = deque(maxlen=EPOCH_ENDS)
        self._unread_ends: deque[tuple[EpochEnd, Any]] = deque(maxlen=EPOCH_ENDS)
        """Ends of epochs, and their metrics, which a report reads: they may wait for a device."""
        self._epoch_metrics = MetricReader()
        self._scheduled: deque[tuple[int, Any]] = deque()
        self._collecting = threading.Lock()
        self._mark: tuple[float, int, Optional[float], Optional[float]] = (0.0, 0, None, None)
        """The last measurement, taken at the end of a step: that time and step, and the seconds waited until then."""
        self._read = 0.0
        """The time of the last reading of metrics."""
        self._reporting = threading.Lock()
        self._news = threading.Event()
        """Set when there may be something to report."""
        self._thread: Optional[threading.Thread] = None
        self.watchers: list[Watcher] = []
        """Called when training begins, and after each step."""
        self.recorders: list[Recorder] = []
        """Called with what a program's own loop reports of a step, before the step counts."""

    @property
    def step(self) -> int:
        return self._step

    def begin(self) -> None:
        """Notes that training begins: from now on, steps are expected."""
        if self._training:
            return
        self._training = True
        self._status.report_phase("is training")
        self.report()
        if self._thread is None:
            self._thread = threading.Thread(target=self._report_forever, name="distlaunch progress", daemon=True)
            self._thread.start()
            atexit.register(self.report)
        for watch in self.watchers:
            watch(self._progress())

    def end(self) -> None:
        """Notes that training is over; the program may continue with other work."""
        self._training = False
        self._status.report_phase("has trained")
        self.report()

    def begin_epoch(self, epoch: int) -> None:
        """Notes the current epoch, and the end of the one before; `epoch` counts from 1."""
        if self._epoch not in (None, epoch):
            self._end_epoch()
        self._epoch = epoch
        if self._first_epoch is None:
            self._first_epoch = epoch

    def resume(self, steps: Optional[int]) -> None:
        """Notes the optimizer's number of steps, maybe from a checkpoint; ignored after the first step."""
        if not self._began:
            self._resumed = steps

    def expect(self, total_steps: Optional[int], total_epochs: Optional[int]) -> None:
        """Notes the step and the epoch at which training will end; None if unknown."""
        self._total_steps, self._total_epochs = total_steps, total_epochs

    def count_step(self, step: int, metrics: Any = None) -> None:
        """Notes that all steps up to this one are done."""
        self._batches += 1
        self._step, self._time = step, clock.now()
        self._metrics.note(metrics)
        self._announce()
        if not self._began:
            self._first_step, self._noted, self._began = step, (self._batches, self._time), self._time
        for watch in self.watchers:
            watch(self._progress())

    def count_batch(self) -> None:
        """Notes that a batch of validation or prediction is done."""
        self._batches += 1
        self._time = clock.now()
        self._announce()

    def schedule(self, steps: int, result: Any) -> None:
        """Notes steps that a worker will do (0 for a batch of validation); they count once they are done.

        `result` is the remote value that shows when the steps are done.
        """
        self._scheduled.append((steps, result))
        self._announce()

    def end_epoch(self, metrics: Any) -> None:
        self._collect()  # the program has waited for all steps
        self._metrics.note(metrics)
        self._end_epoch()

    def _end_epoch(self) -> None:
        """Notes the end of the current epoch, once."""
        self._metrics.read(wait_s=0.0)
        if self._step != self._ended:
            self._ended = self._step
            self._unread_ends.append((EpochEnd(clock.now(), self._step, self._epoch), self._metrics.latest))
            self._announce()

    def _read_epoch_ends(self) -> None:
        while self._unread_ends:
            end, metrics = self._unread_ends.popleft()
            self._epoch_ends.append(replace(end, metrics=self._epoch_metrics.read_only(metrics, BLOCK_LIMIT_S)))

    def report(self) -> None:
        """Writes the current progress to the status file."""
        if not self._reporting.acquire(timeout=BLOCK_LIMIT_S):
            return
        try:
            self._collect()
            self._note_intervals()
            self._read_epoch_ends()
            self._status.report_progress(self._progress())
            if self._began and clock.now() - self._read >= MEASURE_S:
                self._read = clock.now()
                self._measure()
                self._metrics.read(wait_s=BLOCK_LIMIT_S)
                self._status.report_progress(self._progress())
        finally:
            self._reporting.release()

    def _announce(self) -> None:
        if not self._news.is_set():  # setting it takes a lock, which most steps can avoid
            self._news.set()

    def _report_forever(self) -> None:
        # It blocks while nothing happens: otherwise the profile of a task that only waits would contain this thread.
        while self._news.wait():
            self._news.clear()
            time.sleep(REPORT_S)
            with contextlib.suppress(Exception):  # without this thread, the task would be stopped as stalled
                self.report()
            if self._scheduled or self._metrics.has_unread:  # no call of the program announces their results
                self._news.set()

    def _collect(self) -> None:
        """Counts the scheduled steps that are done."""
        with self._collecting:
            waiting: list[tuple[int, Any]] = []
            while self._scheduled and len(waiting) < IN_FLIGHT:
                steps, result = self._scheduled.popleft()
                if not has_ended(result):
                    waiting.append((steps, result))
                elif is_done(result):
                    if steps:
                        self.count_step(self._step + steps, result)
                    else:
                        self.count_batch()
            self._scheduled.extendleft(reversed(waiting))

    def _note_intervals(self) -> None:
        (before, then), noted = self._noted, (self._batches, self._time)
        if self._began and noted[0] > before:
            self._noted = noted
            self._intervals.note(noted[0] - before, noted[1] - then)
            self._p99_s = self._intervals.p99_s

    def _measure(self) -> None:
        before, mark = self._mark, (self._time, self._step, self._waited(), self._awaited_data())
        (then, step, waited, awaited), (now, last, waited_now, awaited_now) = before, mark
        if last <= step or now - then < MEASURE_S:
            return
        self._mark = mark
        if not then:
            return
        self._step_s = (now - then) / (last - step)
        if waited is not None and waited_now is not None:
            self._own_s = max(now - then - (waited_now - waited), 0.0) / (last - step)
        if awaited is not None and awaited_now is not None:
            self._data_s = min(awaited_now - awaited, now - then) / (last - step)

    def _progress(self) -> Progress:
        return Progress(
            step=self._step,
            first_step=self._first_step if self._began else None,
            batches=self._batches,
            began=self._began,
            time=self._time,
            training=self._training,
            epoch=self._epoch,
            first_epoch=self._first_epoch,
            total_steps=self._total_steps,
            total_epochs=self._total_epochs,
            resumed=self._resumed,
            step_s=self._step_s,
            own_s=self._own_s,
            data_s=self._data_s,
            p99_s=self._p99_s,
            metrics=self._metrics.numbers,
            epoch_ends=list(self._epoch_ends),
        )


_meter: Optional[Meter] = None


def install(meter: Meter) -> None:
    """Makes `report` count with this meter."""
    global _meter
    _meter = meter


def report(
    step: Optional[int] = None,
    epoch: Optional[int] = None,
    *,
    total_steps: Optional[int] = None,
    total_epochs: Optional[int] = None,
    **metrics: Any,
) -> None:
    """Reports training progress. A call costs about 2 µs; without a launcher, it does nothing.

    Args:
        step: the number of steps done, as the program counts them; by default one more than before.
        epoch: the current epoch, from 1.
        total_steps: the step at which training will end, if known.
        total_epochs: the epoch at which training will end, if known.
        metrics: values to show, by name: numbers or one-element tensors, which are read once a second.
    """
    if _meter is None:
        return
    _meter.begin()
    for record in _meter.recorders:
        record(step, epoch, metrics)
    if epoch is not None:
        _meter.begin_epoch(int(epoch))
    if total_steps is not None or total_epochs is not None:
        _meter.expect(*(None if total is None else int(total) for total in (total_steps, total_epochs)))
    _meter.count_step(_meter.step + 1 if step is None else int(step), metrics)
