"""Sends step times and goodput to the agent on TensorBoard's node, which writes them to the log directory.

Each task has a folder, so that its curves have its name and colour; curves of the whole run are in the parent folder.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from launcher.clock import SystemTiming
from launcher.report.run_events import AttemptEnded, Record
from launcher.report.status_report import RunStatus, TaskState
from launcher.rundir.journal import Journal
from launcher.tasks import TENSORBOARD, parse_task_id
from worker_entry.protocol.orders import ScalarPoint, Scalars

EVERY_S = 5.0
OF_RUN = 1000
"""In a long run, the interval between points is this fraction (1/1000) of the run's time: a week has 6,000 points."""
POINTS = 200
"""Points in one order."""
FOLDER = "distlaunch"


class Nodes(Protocol):
    """The nodes of a run, by name."""

    def is_heard(self, node: str) -> bool:
        """Whether the node's agent was heard recently."""

    def send(self, node: str, order: Scalars) -> object:
        """Sends an order to the node's agent."""


class ScalarSender:
    """A sender of a run's points from `begin` to `close`: every few seconds, and at the end of each attempt."""

    def __init__(self, directory: str, make_status: Callable[[], RunStatus], journal: Journal, nodes: Nodes) -> None:
        self._directory = directory
        self._make_status = make_status
        self._journal = journal
        self._nodes = nodes
        self._steps: dict[str, int] = {}
        self._due = 0.0
        self._lock = threading.Lock()
        self._end: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Starts to send."""
        self._journal.listen(self._note)
        self._end = SystemTiming().repeat(self._send_due, EVERY_S, EVERY_S)

    def close(self) -> None:
        """Stops sending."""
        self._end()

    def _note(self, record: Record) -> None:
        if isinstance(record.event, AttemptEnded):
            self._send_points()

    def _send_due(self) -> bool:
        status = self._make_status()
        if status.now >= self._due:
            self._due = status.now + max(EVERY_S / 2, (status.now - status.started) / OF_RUN)
            self._send_points()
        return False

    def _send_points(self) -> None:
        with self._lock:
            status = self._make_status()
            node = next((task.node for task in status.tasks if task.task == str(TENSORBOARD)), None)
            if node is None or not self._nodes.is_heard(node):  # orders to a silent node would pile up in memory
                return
            points = [*make_points(status, self._steps)]
            self._steps |= {task.task: task.step for task in status.tasks if task.step is not None}
        for first in range(0, len(points), POINTS):
            self._nodes.send(node, Scalars(self._directory, points[first : first + POINTS]))


def make_points(status: RunStatus, sent: Mapping[str, int]) -> Iterator[ScalarPoint]:
    """Yields the current points.

    Args:
        status: the run now.
        sent: the step of the last point of each task; a task that has done no step since then gets no new point.
    """
    for task in status.tasks:
        values = _values_of(task)
        if task.step is not None and task.step != sent.get(task.task) and values:
            yield ScalarPoint(f"{FOLDER}/{parse_task_id(task.task).file_name}", task.step, status.now, values)
    if status.goodput is not None:
        seconds = {f"goodput/{kind}_seconds": value for kind, value in status.goodput.by_kind().items()}
        step = max((task.step for task in status.tasks if task.step is not None), default=0)
        yield ScalarPoint(FOLDER, step, status.now, {"goodput/share": status.goodput.share, **seconds})


def _values_of(task: TaskState) -> dict[str, float]:
    values = {
        "distlaunch/step_seconds": task.step_s,
        "distlaunch/own_seconds": task.own_s,
        "distlaunch/waiting_seconds": task.waiting_s,
        "distlaunch/data_seconds": task.data_s,
    }
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
