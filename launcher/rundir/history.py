"""The history that a later controller reads from the journal: ended attempts, and the one that may still run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import get_args

from launcher.gang import events as gang
from launcher.gang.decide import take_over
from launcher.gang.facts import apply
from launcher.gang.policy import AttemptPolicy
from launcher.gang.restarts import AttemptOutcome
from launcher.gang.state import AttemptState, Phase
from launcher.plan.paths import RunPaths
from launcher.report.models import AttemptReport
from launcher.report.run_events import AttemptEnded, Ended, NodeMet, Record, RunStarted, State
from launcher.report.run_report import Earlier
from launcher.report.state_names import StateName
from launcher.rundir.record import RecordedRun
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.messages import Ready

_FACTS = get_args(gang.Fact)


@dataclass(frozen=True)
class History:
    """The history of a run so far."""

    attempts: tuple[AttemptReport, ...] = ()
    """The attempts that are over, in order."""
    endings: tuple[AttemptOutcome, ...] = ()
    """The ends of these attempts, for the restart rule."""
    attempt: int = 0
    """The number of the last attempt that began."""
    state: StateName = "connecting"
    ended: Ended | None = None
    """How the last controller ended the run, if it did."""
    began: float = 0.0
    """When the last attempt began, in Unix seconds."""
    attended: float = 0.0
    """When a controller that had an attempt last wrote to the journal, as recorded there, in Unix seconds."""
    is_attended: bool = False
    """Whether the last controller had an attempt; otherwise it cannot have reached any task."""
    records: tuple[Record, ...] = ()
    """The gang's events of the last attempt."""
    ready: Mapping[str, Ready] = field(default_factory=dict)
    """The facts of each node whose agent was met."""
    frames: Mapping[str, int] = field(default_factory=dict)
    """The number of each agent's last message that is known to have been handled."""

    @property
    def events(self) -> list[gang.Event]:
        """The gang's events of the last attempt, without the tasks' answers to a suspicion, which are out of date."""
        return [
            entry.event
            for entry in self.records
            if isinstance(entry.event, _FACTS) and not isinstance(entry.event, gang.StacksReceived)
        ]

    @property
    def ports(self) -> dict[TaskId, int]:
        """The ports of the last attempt's tasks."""
        prepared = [event.ports for event in self.events if isinstance(event, gang.NodePrepared)]
        return {task: port for ports in prepared for task, port in ports.items()}

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


def read_history(files: RunPaths) -> History:
    """Returns the history in a run's journal; empty if there is none."""
    attempts: list[AttemptReport] = []
    endings: list[AttemptOutcome] = []
    records: list[Record] = []
    ready: dict[str, Ready] = {}
    met: set[str] = set()  # the nodes whose agents the current controller knows to be there
    frames: dict[str, int] = {}
    state: StateName = "connecting"
    ended: Ended | None = None
    number, began, attended, is_attended = 0, 0.0, 0.0, False
    for entry in RecordedRun(files).read_records():
        if isinstance(entry.event, RunStarted):
            attended, is_attended = max(attended, entry.event.written if is_attended else 0.0), False
            met.clear()
        if entry.attempt:
            attended, is_attended = max(attended, entry.time), True
        if entry.attempt > number:
            number, began = entry.attempt, entry.time
            records.clear()
            ready = {node: facts for node, facts in ready.items() if node in met}  # a full disk may lose the new ones
        if isinstance(entry.event, NodeMet):
            ready[entry.event.node] = entry.event.ready
            met.add(entry.event.node)
            frames[entry.event.node] = 0  # a new agent counts from the beginning
        elif isinstance(entry.event, AttemptEnded):
            attempts.append(entry.event.report)
            endings += [entry.event.ending] if entry.event.ending is not None else []
        elif isinstance(entry.event, State):
            state, ended = entry.event.state, None
        elif isinstance(entry.event, Ended):
            ended = entry.event
        elif isinstance(entry.event, _FACTS):
            records.append(entry)
        if isinstance(entry.event, gang.NodeAttached):
            met.add(entry.event.node)
        if entry.node:
            frames[entry.node] = max(frames.get(entry.node, 0), entry.frame)
    return History(
        attempts=tuple(attempts),
        endings=tuple(endings),
        attempt=number,
        state=state,
        ended=ended,
        began=began,
        attended=attended,
        is_attended=is_attended,
        records=tuple(records),
        ready=ready,
        frames=frames,
    )


def replay(history: History, policy: AttemptPolicy) -> AttemptState:
    """The state of the running attempt of an earlier controller, ready to be taken over.

    The events give the facts. No rule judges them again: the journal has neither all steps nor the passing of time, so
    a healthy cluster would seem to hang.

    Args:
        history: has the attempt's events.
        policy: the attempt's policy.
    """
    # All of its nodes have answered; those that stayed connected after an earlier attempt did so then.
    facts = AttemptState(policy, phase=Phase.FORMING, ready=policy.hosts)
    for event in history.events:
        facts = apply(facts, event)
    return take_over(facts)
