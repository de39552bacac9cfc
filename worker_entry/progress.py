"""How far training has come: counted here, told through the task's status file.

`model.fit` is counted by itself (`keras_progress`). A loop of one's own says so, in one line:

    from worker_entry import progress

    for step, batch in enumerate(data, 1):
        loss = train_step(batch)
        progress.report(step=step, loss=loss)
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Optional

from worker_entry.telling import Teller
from worker_entry.values import Progress

REFRESH_S = 1.0
"""How often metrics are read and step times are measured: to read a value may have to wait for its device."""
METRICS_LIMIT = 20
NAME_LIMIT = 60

Watcher = Callable[[Progress], None]


class Meter:
    """Counts the steps of this process, and tells them.

    `waited`: seconds that this process has waited for the others so far, None where that is not known.
    """

    def __init__(self, teller: Teller, waited: Callable[[], Optional[float]]) -> None:
        self._teller = teller
        self._waited = waited
        self._training = False
        self._epoch: Optional[int] = None
        self._first_epoch: Optional[int] = None
        self._step = self._first_step = self._batches = 0
        self._began = self._time = 0.0
        self._step_s: Optional[float] = None
        self._own_s: Optional[float] = None
        self._metrics: dict[str, Optional[float]] = {}
        self._mark: tuple[float, int, Optional[float]] = (0.0, 0, None)
        self.watchers: list[Watcher] = []

    @property
    def step(self) -> int:
        return self._step

    def begin(self) -> None:
        """Training begins: from now on steps are expected."""
        if not self._training:
            self._training = True
            self._teller.tell_phase("is training")
            self._tell()

    def end(self) -> None:
        """Training is over; the program may have other things to do."""
        self._training = False
        self._teller.tell_phase("has trained")
        self._tell()

    def begin_epoch(self, epoch: int) -> None:
        """`epoch` counts from 1."""
        self._epoch = epoch
        if self._first_epoch is None:
            self._first_epoch = epoch

    def count_step(self, step: int, metrics: Optional[Mapping[str, Any]] = None) -> None:
        """All steps up to this one are done."""
        now = time.time()
        self._batches += 1
        self._step, self._time = step, now
        if not self._began:
            self._began, self._first_step = now, step
            self._mark = (now, step, self._waited())
            self._read(metrics)
        elif now - self._mark[0] >= REFRESH_S and step > self._mark[1]:
            self._measure(now)
            self._read(metrics)
        self._tell()

    def count_batch(self) -> None:
        """A batch of something else than training is done."""
        self._batches += 1
        self._time = time.time()
        self._tell()

    def end_epoch(self, metrics: Optional[Mapping[str, Any]]) -> None:
        self._read(metrics)
        self._tell()

    def _measure(self, now: float) -> None:
        then, step, waited = self._mark
        self._mark = (now, self._step, self._waited())
        self._step_s = (now - then) / (self._step - step)
        now_waited = self._mark[2]
        if waited is not None and now_waited is not None:
            self._own_s = max(now - then - (now_waited - waited), 0.0) / (self._step - step)

    def _read(self, metrics: Optional[Mapping[str, Any]]) -> None:
        for name, value in list((metrics or {}).items())[:METRICS_LIMIT]:
            with contextlib.suppress(Exception):  # it is the program's: no number, or one that cannot be had now
                number = float(value)
                self._metrics[str(name)[:NAME_LIMIT]] = number if math.isfinite(number) else None

    def _tell(self) -> None:
        progress = Progress(
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
            self._metrics,
        )
        self._teller.tell_progress(progress)
        for watch in self.watchers:
            watch(progress)


_meter: Optional[Meter] = None


def install(meter: Meter) -> None:
    """From now on, `report` counts with it."""
    global _meter
    _meter = meter


def report(step: Optional[int] = None, epoch: Optional[int] = None, **metrics: Any) -> None:
    """Says that training has come so far. It costs about 10 µs, and does nothing where no launcher listens.

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
