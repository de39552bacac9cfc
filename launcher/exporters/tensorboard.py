"""Sends step times and goodput to the agent on TensorBoard's node, which writes them to the log directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from launcher.clock import SystemTiming
from launcher.report.run_events import AttemptEnded, Record
from launcher.report.scalars import make_points
from launcher.report.status_report import RunStatus
from launcher.rundir.journal import Journal
from launcher.tasks import TENSORBOARD
from worker_entry.protocol.orders import Scalars

EVERY_S = 5.0
OF_RUN = 1000
"""In a long run, the interval between points is this fraction (1/1000) of the run's time: a week has 6,000 points."""
POINTS = 200
"""Points in one order."""


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
