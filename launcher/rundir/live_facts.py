"""The progress of an active run, from the end of its journal and from its controller."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from launcher.plan.paths import RunPaths
from launcher.report.state_names import LiveState
from launcher.rundir.journal_reading import read_last_entries
from launcher.rundir.record import RunRecord
from worker_entry.protocol.frozen import dataclass, replace

Progress = tuple[int | None, int | None]
"""Epoch and step."""

ATTEMPT_BYTES = 256 << 10
"""Bytes of events.jsonl that are read."""
ANSWER_S = 0.2
"""How long a controller may take to report its tasks' progress before the journal is used instead."""


@dataclass(frozen=True, kw_only=True)
class LiveFacts:
    """The known facts about a run's current attempt."""

    state: LiveState = "running"
    attempt: int = 0
    tasks: int | None = None
    tasks_up: int | None = None
    epoch: int | None = None
    step: int | None = None


def live_facts(files: RunPaths, record: RunRecord) -> LiveFacts:
    """Returns the current attempt's facts from the journal, and its steps from the controller if it answers in time."""
    facts = replay(read_last_entries(files.events, ATTEMPT_BYTES)[0], _count_tasks(files))
    epoch, step = _ask_progress(record)
    return facts if epoch is None and step is None else replace(facts, epoch=epoch, step=step)


def replay(events: Sequence[Mapping[str, Any]], tasks: int | None) -> LiveFacts:
    """Returns the facts that follow from a journal's last events; earlier events are unknown."""
    state: LiveState = "running"
    attempt = 0
    progress: dict[str, Progress] = {}
    up: set[str] | None = None
    for event in events:
        kind, number, task = event.get("event"), event.get("attempt"), event.get("task")
        if kind == "run-started" or (isinstance(number, int) and number > attempt > 0):
            up, progress = set(), {}
        if kind == "run-started":
            state = "connecting"
        if isinstance(number, int):
            attempt = number
            if number == 0 and up is None:
                up = set()
        if kind == "state" and event.get("state") in get_args(LiveState):
            state = event["state"]
        if not isinstance(task, str):
            continue
        if up is not None and kind == "task-started":
            up.add(task)
        elif up is not None and kind == "task-exited":
            up.discard(task)
        elif kind == "task-reported":
            progress[task] = _read_progress(event.get("progress"))
    epoch, step = _furthest(progress.values())
    return LiveFacts(
        state=state,
        attempt=attempt,
        tasks=tasks,
        tasks_up=None if up is None else len(up),
        epoch=epoch,
        step=step,
    )


def _ask_progress(record: RunRecord) -> Progress:
    if not record.socket:
        return None, None
    # Imported here: this loads the protocol's messages, which a list of ended runs does not need.
    from launcher.rundir.control import AskStatus, RefusedError, ask

    try:
        answer, connection = ask(record.socket, record.controller.pid, AskStatus(), ANSWER_S)
        connection.close()
        return _furthest(map(_read_progress, json.loads(answer)["tasks"]))
    except (OSError, RefusedError, ValueError, KeyError, TypeError):
        return None, None


def _read_progress(facts: object) -> Progress:
    """Epoch and step as a task reported them; before its first step, `first_step` is null."""
    if not isinstance(facts, dict):
        return None, None
    epoch, step = facts.get("epoch"), facts.get("step")
    has_stepped = facts.get("first_step", 0) is not None
    return (
        epoch if isinstance(epoch, int) else None,
        step if isinstance(step, int) and has_stepped else None,
    )


def _furthest(progress: Iterable[Progress]) -> Progress:
    return max(progress, key=lambda each: [-1 if value is None else value for value in each], default=(None, None))


def _count_tasks(files: RunPaths) -> int | None:
    try:
        return len(json.loads(files.plan.read_bytes())["tasks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
