"""Converts the metrics that a program reports to numbers, without delaying the program.

A plain number is read at once. Reading any other object may take long or never return: a tensor waits for its device, a
remote value for its worker, and the program's own objects may do anything. A separate thread reads these objects; if it
blocks for ever, their metrics are missing, but nothing else is affected.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Optional

from worker_entry.hooks.remote_values import is_here, is_remote
from worker_entry.protocol.field_limits import FLOAT_LIMIT

METRICS_LIMIT = 20
NAME_LIMIT = 60


class MetricReader:
    """Reads the latest metrics that were noted."""

    def __init__(self) -> None:
        self.numbers: dict[str, Optional[float]] = {}
        """The metrics that have been read, by name; None for a number that no message can contain."""
        self._incomplete = False
        self._latest: Any = None
        self._seen: Any = None
        self._others: Any = None
        self._order = self._first = 0
        self._orders: dict[str, int] = {}
        self._storing = threading.Lock()
        self._asked = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: Optional[threading.Thread] = None

    @property
    def has_unread(self) -> bool:
        """Whether there are metrics that have not been read, or values that were not available yet."""
        return self._incomplete or self._latest is not self._seen

    def note(self, metrics: Any) -> None:
        """Keeps the metrics, to be read later; ignores None and an empty dictionary."""
        if metrics is not None and not (type(metrics) is dict and not metrics):
            self._latest = metrics

    @property
    def latest(self) -> Any:
        """The metrics that were noted last."""
        return self._latest

    def read_only(self, metrics: Any, wait_s: float) -> dict[str, Optional[float]]:
        """Returns the numbers of these metrics alone; those that cannot be read within `wait_s` are missing."""
        with self._storing:
            self.numbers, self._orders, self._first = {}, {}, self._order + 1
        self._latest = metrics
        self.read(wait_s)
        return self.numbers

    def read(self, wait_s: float) -> None:
        """Reads the last noted metrics. Returns after at most `wait_s`; slower values are read in the background."""
        self._seen = latest = self._latest
        self._order += 1
        others: Any = latest
        if type(latest) is dict:
            items = list(latest.items())[:METRICS_LIMIT]
            others = {name: value for name, value in items if not _is_plain(value)}
            for name, value in items:
                if _is_plain(value):
                    self._store(name, value, self._order)
        self._incomplete = False
        if others is None or (type(others) is dict and not others) or not self._idle.is_set():
            return
        self._others = others, self._order
        self._idle.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_others, name="distlaunch metrics", daemon=True)
            self._thread.start()
        self._asked.set()
        self._idle.wait(wait_s)

    def _read_others(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            others, order = self._others
            self._others = None
            with contextlib.suppress(BaseException):  # the program's objects may raise anything
                self._read_mapping(others, order)
            del others
            self._idle.set()

    def _read_mapping(self, metrics: Any, order: int) -> None:
        if not self._is_there(metrics):
            return
        metrics = metrics.fetch() if is_remote(metrics) else metrics
        for name, value in list(metrics.items())[:METRICS_LIMIT]:
            with contextlib.suppress(BaseException):  # not a number, or not readable now
                if self._is_there(value):
                    self._store(name, value.fetch() if is_remote(value) else value, order)

    def _is_there(self, value: Any) -> bool:
        there = not is_remote(value) or is_here(value)
        self._incomplete = self._incomplete or not there
        return there

    def _store(self, name: Any, value: Any, order: int) -> None:
        number = _to_number(value)
        name = str(name)[:NAME_LIMIT]
        with self._storing:
            if order >= self._orders.get(name, self._first):  # otherwise a later read has already stored its value
                self._orders[name] = order
                self.numbers = {**self.numbers, name: number if abs(number) < FLOAT_LIMIT else None}


def _is_plain(value: Any) -> bool:
    """Whether reading the value can neither block nor raise."""
    return type(value) in (int, float, bool)


def _to_number(value: Any) -> float:
    if _is_plain(value):
        return float(value)
    # Not float(): for an array with axes or a complex number, NumPy would warn in the program's log.
    for name in ("numpy", "item"):
        convert = getattr(value, name, None)
        if callable(convert):
            value = convert()
    return float(value)
