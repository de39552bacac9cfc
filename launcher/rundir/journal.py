"""Writes the run's journal, events.jsonl, during the run; see `report.run_events` for its lines."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.gang.claims import render_busy_gpus
from launcher.gang.events import Event, Fact, NodeClaimed, StacksReceived, TaskReported
from launcher.gang.state import AttemptState, Phase
from launcher.report.journal_line import Level, Message
from launcher.report.models import RunReport
from launcher.report.run_events import Ended, Record, RunEvent, State, render_record
from launcher.report.state_names import StateName
from launcher.report.status_report import name_state
from launcher.tasks import TaskId
from launcher.transports.allowances import Bucket
from worker_entry.protocol.frozen import replace

NODE_BYTES, TASK_BYTES, BYTES_PER_S = 1 << 20, 128 << 10, 1 << 10
"""How much a node's messages may add to the journal in an attempt: at once for the node and for each of its tasks, and
later per second for each."""


class Journal:
    """A file to which any thread may append lines. A full disk loses lines, but never stops the run.

    Args:
        path: the file; made if it is missing.
        now: returns Unix seconds.
    """

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self.attempt = 0
        self.waits = False
        """Whether the run ends for now and continues when Slurm has nodes for it again."""
        self._now = now
        self._lock = threading.Lock()
        self._state: StateName | None = None
        self._reported: dict[TaskId | str, object] = {}
        """The last written report of each task, and the last written GPUs of each node."""
        self._ended: Ended | None = None
        self._room: dict[str, Bucket] = {}
        """How much each node may still write in this attempt."""
        self._listeners: list[Callable[[Record], None]] = []
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._descriptor).st_size
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        """Whether the last line may be incomplete: a line break then separates it from the next."""

    @property
    def state(self) -> StateName:
        """The run's state."""
        return self._state or "connecting"

    @property
    def ended(self) -> Ended | None:
        """How the run ended, once it has."""
        return self._ended

    def listen(self, listener: Callable[[Record], None]) -> None:
        """Calls `listener` with each line from now on, on the writing thread; `listener` must return at once."""
        self._listeners.append(listener)

    def write(self, event: RunEvent, node: str = "", frame: int = 0, room: Bucket | None = None) -> None:
        """Appends a line, if there is `room` for it."""
        record = Record(self._now(), self.attempt, event, node, frame)
        line = render_record(record)
        if room is not None and not room.take(len(line), record.time):
            return
        with self._lock, contextlib.suppress(OSError):
            if self._descriptor < 0:
                return
            line = b"\n" * self._is_torn + line
            self._is_torn = True
            self._is_torn = os.write(self._descriptor, line) < len(line)
        for listener in self._listeners:
            listener(record)

    def touch(self) -> None:
        """Shows that this controller runs, even without events: a later controller sees when the file last changed."""
        with self._lock, contextlib.suppress(OSError):
            if self._descriptor >= 0:
                os.utime(self._descriptor)

    def say(self, level: Level, text: str) -> None:
        """Appends a message to the user."""
        self.write(Message(level, text))

    def begin_attempt(self, number: int, nodes: Mapping[str, int]) -> None:
        """Begins an attempt; `nodes`: the number of tasks on each node."""
        self.attempt = number
        self._reported.clear()
        now = self._now()
        self._room = {
            node: Bucket(NODE_BYTES + tasks * TASK_BYTES, (1 + tasks) * BYTES_PER_S, now)
            for node, tasks in nodes.items()
        }

    def note_event(self, before: AttemptState, after: AttemptState, event: Event, node: str, frame: int) -> None:
        """Appends a fact that changed the gang's state, unless it reports only steps, or that tasks are healthy."""
        is_healthy = isinstance(event, StacksReceived) and after.phase is Phase.RUNNING and not after.seems_stalled
        if after is not before and isinstance(event, Fact) and not is_healthy and self._is_news(event):
            self.write(event, node, frame, self._room.get(node))
        state = name_state(after)
        why = ("gpus-busy", render_busy_gpus(after.lacked)) if state == "waiting" else ("", "")
        self.note_state(state, *why)

    def note_state(self, state: StateName, reference: str = "", message: str = "") -> None:
        """Appends the run's state if it has changed."""
        if state != self._state:
            self._state = state
            self.write(State(state, reference, message))

    def end(self, report: RunReport) -> None:
        """Appends the end of the run."""
        verdict = report.verdict
        self._ended = Ended(report.outcome, report.exit_status, verdict.reference, verdict.message)
        self.note_state(report.outcome, verdict.reference, verdict.message)
        self.write(self._ended)

    def close(self) -> None:
        with self._lock:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_news(self, event: Fact) -> bool:
        if isinstance(event, NodeClaimed):  # again in each round in which another node has too few GPUs
            is_relevant = self._reported.get(event.node) != event
            self._reported[event.node] = event
            return is_relevant
        if not isinstance(event, TaskReported):
            return True
        progress = event.progress
        facts = (
            replace(event, progress=None, model=None),
            progress is not None and (progress.training, progress.first_step),
        )
        is_relevant = self._reported.get(event.task) != facts
        self._reported[event.task] = facts
        return is_relevant
