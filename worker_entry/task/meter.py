"""How far training has come: counted here, told through the task's status file.

`model.fit` is counted by itself (`keras_progress`); a loop of the program's own calls `worker_entry.progress.report`.
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
from worker_entry.protocol.values import Progress
from worker_entry.system import clock
from worker_entry.task.metrics import MetricReader
from worker_entry.task.status_file import StatusFile

TELL_S = 0.5
"""How often it is told."""
MEASURE_S = 1.0
"""How often step times are measured and metrics read: to read a value may have to wait for its device."""
PATIENCE_S = 0.2
"""How long a program is held up at most by one who tells already, or by a metric that is being read."""
IN_FLIGHT = 1000
"""Scheduled steps that are looked at beyond the last one that is done: workers do them nearly in their order."""

Watcher = Callable[[Progress], None]


class Meter:
    """Counts the steps of this process, and tells them from a thread of its own.

    A step only counts up: to write a file would hand Python's lock to whoever waits for it, a tenth of a short step.

    `waited`: seconds that this process has waited for the others so far, None where that is not known.
    """

    def __init__(self, status: StatusFile, waited: Callable[[], Optional[float]]) -> None:
        self._status = status
        self._waited = waited
        self._training = False
        self._epoch: Optional[int] = None
        self._first_epoch: Optional[int] = None
        self._step = self._first_step = self._batches = 0
        self._began = self._time = 0.0
        self._step_s: Optional[float] = None
        self._own_s: Optional[float] = None
        self._metrics = MetricReader()
        self._scheduled: deque[tuple[int, Any]] = deque()
        self._collecting = threading.Lock()
        self._mark: tuple[float, int, Optional[float]] = (0.0, 0, None)
        self._telling = threading.Lock()
        self._thread: Optional[threading.Thread] = None
        self.watchers: list[Watcher] = []

    @property
    def step(self) -> int:
        return self._step

    def begin(self) -> None:
        """Training begins: from now on steps are expected."""
        if self._training:
            return
        self._training = True
        self._status.report_phase("is training")
        self.tell()
        if self._thread is None:
            self._thread = threading.Thread(target=self._tell_on, name="distlaunch progress", daemon=True)
            self._thread.start()
            atexit.register(self.tell)

    def end(self) -> None:
        """Training is over; the program may have other things to do."""
        self._training = False
        self._status.report_phase("has trained")
        self.tell()

    def begin_epoch(self, epoch: int) -> None:
        """`epoch` counts from 1."""
        self._epoch = epoch
        if self._first_epoch is None:
            self._first_epoch = epoch

    def count_step(self, step: int, metrics: Any = None) -> None:
        """All steps up to this one are done."""
        self._batches += 1
        self._step, self._time = step, clock.now()
        self._metrics.note(metrics)
        if not self._began:
            self._first_step, self._began = step, self._time
        for watch in self.watchers:
            watch(self._progress())

    def count_batch(self) -> None:
        """A batch of something else than training is done."""
        self._batches += 1
        self._time = clock.now()

    def schedule(self, steps: int, result: Any) -> None:
        """Some worker will do so many steps (none, for a batch of something else); they count once it has done them.

        `result`: a remote value that can be asked how far it is.
        """
        self._scheduled.append((steps, result))

    def end_epoch(self, metrics: Any) -> None:
        self._collect()  # the program has waited for them
        self._metrics.note(metrics)
        self._metrics.read(wait_s=0.0)

    def tell(self) -> None:
        """Tells now what has been counted."""
        if not self._telling.acquire(timeout=PATIENCE_S):
            return
        try:
            self._collect()
            self._status.report_progress(self._progress())
            if self._began and clock.now() - self._mark[0] >= MEASURE_S:
                self._measure()
                self._metrics.read(wait_s=PATIENCE_S)
                self._status.report_progress(self._progress())
        finally:
            self._telling.release()

    def _tell_on(self) -> None:
        told = -1
        while True:
            time.sleep(TELL_S)
            with contextlib.suppress(Exception):  # a thread that ended would leave the task to be stopped as stalled
                if self._scheduled or self._metrics.has_unread or told != self._batches:
                    told = self._batches
                    self.tell()

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

    def _measure(self) -> None:
        (then, step, waited), mark = self._mark, (self._time, self._step, self._waited())
        if mark[1] <= step:
            return
        self._mark = mark
        if not then:
            return
        self._step_s = (mark[0] - then) / (mark[1] - step)
        if waited is not None and mark[2] is not None:
            self._own_s = max(mark[0] - then - (mark[2] - waited), 0.0) / (mark[1] - step)

    def _progress(self) -> Progress:
        return Progress(
            self._step,
            self._first_step,
            self._batches,
            self._began,
            self._time,
            self._training,
            self._epoch,
            self._first_epoch,
            self._step_s,
            self._own_s,
            self._metrics.numbers,
        )


_meter: Optional[Meter] = None


def install(meter: Meter) -> None:
    """From now on, `report` counts with it."""
    global _meter
    _meter = meter


def report(step: Optional[int] = None, epoch: Optional[int] = None, **metrics: Any) -> None:
    """Says that training has come so far. It costs about 2 µs, and nothing where no launcher listens.

    Args:
        step: how many steps are done, as the program counts them; without it, one more than before.
        epoch: the epoch that is under way, from 1.
        metrics: what to show, by name: numbers, or tensors of one number, which are read once a second.
    """
    if _meter is None:
        return
    _meter.begin()
    if epoch is not None:
        _meter.begin_epoch(int(epoch))
    _meter.count_step(_meter.step + 1 if step is None else int(step), metrics)
