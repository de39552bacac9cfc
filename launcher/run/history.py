"""The history that a later controller reads from the journal: ended attempts, and the attempt that may go on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

from launcher.gang import events as gang
from launcher.gang.decide import decide, new_attempt
from launcher.gang.restarts import Ending
from launcher.gang.state import AttemptPolicy, AttemptState
from launcher.report.models import AttemptReport
from launcher.report.run_events import AttemptEnded, Ended, NodeMet, Record, State, StateName, parse_records
from launcher.report.run_report import Earlier
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.messages import Ready

_GANG = get_args(gang.Event)


@dataclass(frozen=True)
class History:
    """The history of a run so far."""

    attempts: tuple[AttemptReport, ...] = ()
    """The attempts that are over, in order."""
    endings: tuple[Ending, ...] = ()
    """The ends of these attempts, for the restart rule."""
    attempt: int = 0
    """The number of the last attempt that began."""
    state: StateName = "connecting"
    ended: Ended | None = None
    """How the last controller ended the run, if it did."""
    began: float = 0.0
    """When the last attempt began, in Unix seconds."""
    records: tuple[Record, ...] = ()
    """The gang's events of the last attempt."""
    ready: Mapping[str, Ready] = field(default_factory=dict)
    """The facts of each node whose agent was met."""
    frames: Mapping[str, int] = field(default_factory=dict)
    """The number of each agent's last message that is known to have been handled."""

    @property
    def ports(self) -> dict[TaskId, int]:
        """The ports of the last attempt's tasks."""
        events = [record.event for record in self.records]
        return dict(port for event in events if isinstance(event, gang.NodePrepared) for port in event.ports.items())

    @property
    def earlier(self) -> Earlier:
        """The attempts that are over, as a report keeps them."""
        return functools.reduce(Earlier.add, self.attempts, Earlier())

    @property
    def is_open(self) -> bool:
        """Whether the last attempt has not ended."""
        return self.attempt > max((report.attempt for report in self.attempts), default=0)


NO_HISTORY = History()
"""The history for a run's first controller."""


def read_history(path: Path) -> History:
    """Returns the history in a journal; empty if there is none. Ignores torn lines and unknown kinds."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return NO_HISTORY
    attempts: list[AttemptReport] = []
    endings: list[Ending] = []
    records: list[Record] = []
    ready: dict[str, Ready] = {}
    frames: dict[str, int] = {}
    state: StateName = "connecting"
    ended: Ended | None = None
    number, began = 0, 0.0
    for record in parse_records(lines):
        if record.attempt > number:
            number, began = record.attempt, record.time
            records.clear()
        if isinstance(record.event, NodeMet):
            ready[record.event.node] = record.event.ready
        elif isinstance(record.event, AttemptEnded):
            attempts.append(record.event.report)
            endings += [record.event.ending] if record.event.ending is not None else []
        elif isinstance(record.event, State):
            state, ended = record.event.state, None
        elif isinstance(record.event, Ended):
            ended = record.event
        elif isinstance(record.event, _GANG):
            records.append(record)
        if isinstance(record.event, gang.NodeReady):
            frames[record.node] = 0  # a new agent counts from the beginning
        if record.node:
            frames[record.node] = max(frames.get(record.node, 0), record.frame)
    return History(
        attempts=tuple(attempts),
        endings=tuple(endings),
        attempt=number,
        state=state,
        ended=ended,
        began=began,
        records=tuple(records),
        ready=ready,
        frames=frames,
    )


def replay(history: History, policy: AttemptPolicy, monotonic_of: Callable[[float], float]) -> AttemptState:
    """Rebuilds the state of the last attempt from its events.

    Args:
        history: has the attempt's events.
        policy: the attempt's policy.
        monotonic_of: returns the monotonic clock at a moment in Unix seconds.
    """
    state = new_attempt(policy, monotonic_of(history.began))
    for record in history.records:
        assert isinstance(record.event, _GANG)
        state, _ = decide(state, record.event, monotonic_of(record.time))
    return state
