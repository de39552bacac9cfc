"""The last part of a page: the ends of the logs, the stacks, the events, the nodes, the plan and the spec."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.gang.events import LeaderWaits, StacksReceived, TaskReported
from launcher.pages.page_data import LogEnd, PageData
from launcher.pages.wording import render_offset
from launcher.plan.rendering import complete_command
from launcher.report.journal_line import Message
from launcher.report.run_events import AttemptEnded, Ended, NodeMet, Record, RunStarted, State, kind_of
from worker_entry.protocol.frozen import dataclass

FIRST_EVENTS = 150
LAST_EVENTS = 350
EVENT_TEXT = 400
PLAN_TEXT = 200_000
STACKS_TEXT = 200_000


@dataclass(frozen=True)
class EventRow:
    """An event. `at`: the time since the start of the run."""

    at: str
    attempt: int
    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class NodeRow:
    """A node of the run, as described by its agent."""

    node: str
    hostname: str
    python: str
    tensorflow: str
    cores: str
    gpus: str
    tasks: str


@dataclass(frozen=True)
class TaskAddress:
    """Where a task runs."""

    task: str
    node: str
    address: str
    command: str


@dataclass(frozen=True)
class Appendix:
    """The last part of a page."""

    logs: Sequence[LogEnd]
    stacks: str
    events: Sequence[EventRow]
    left_out: int
    """Events in the middle that are not shown."""
    nodes: Sequence[NodeRow]
    addresses: Sequence[TaskAddress]
    versions: Mapping[str, str]
    plan: str
    spec: str


def make_appendix(data: PageData) -> Appendix:
    rows = [row for record in data.records if (row := _make_event(record, data.started)) is not None]
    shown = rows if len(rows) <= FIRST_EVENTS + LAST_EVENTS else [*rows[:FIRST_EVENTS], *rows[-LAST_EVENTS:]]
    return Appendix(
        logs=data.logs,
        stacks=cut(data.stacks, STACKS_TEXT),
        events=shown,
        left_out=len(rows) - len(shown),
        nodes=_make_nodes(data),
        addresses=_make_addresses(data),
        versions=data.versions,
        plan=cut(json.dumps(data.plan, indent=2, ensure_ascii=False), PLAN_TEXT) if data.plan else "",
        spec=cut(data.spec, PLAN_TEXT),
    )


def cut(text: str, limit: int) -> str:
    """The text; if it is too long, its beginning and its end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n… {len(text) - limit:,} characters left out …\n{text[-limit // 2 :]}"


def _make_event(record: Record, started: float) -> EventRow | None:
    """The row of an event; None for events that the page does not list."""
    event = record.event
    if isinstance(event, LeaderWaits):
        return None
    facts = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    where = str(facts.pop("task", "") or facts.pop("node", "") or record.node)
    facts.pop("time", None)
    return EventRow(
        render_offset(record.time - started),
        record.attempt,
        kind_of(event),
        where,
        cut(_describe(record, facts), EVENT_TEXT),
    )


def _describe(record: Record, facts: Mapping[str, Any]) -> str:
    match record.event:
        case Message(text=text):
            return text
        case State(state, reference, message):
            return f"{state}{f' [{reference}]' if reference else ''}{f': {message}' if message else ''}"
        case AttemptEnded(report):
            return report.verdict.message
        case Ended(outcome, status, reference, message):
            return f"{outcome}, exit status {status}: {message} [{reference}]"
        case NodeMet(_, ready):
            return f"{ready.hostname}, Python {ready.python}, process {ready.pid}"
        case RunStarted(run_id=run_id):
            return run_id
        case StacksReceived(texts):
            return f"of {len(texts)} tasks"
        case TaskReported() as event:
            step = event.progress.step if event.progress is not None else 0
            return f"{event.phase}{f', step {step:,}' if step else ''}"
    return ", ".join(f"{name} {_render(value)}" for name, value in facts.items() if value not in (None, "", (), {}))


def _render(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return ", ".join(map(_render, value))
    return str(getattr(value, "message", value))


def _make_nodes(data: PageData) -> list[NodeRow]:
    met = {each.event.node: each.event.ready for each in data.records if isinstance(each.event, NodeMet)}
    planned = data.planned
    names = dict.fromkeys([*(str(task.get("node", "")) for task in planned), *met])
    rows = []
    for name in filter(None, names):
        ready = met.get(name)
        tasks = [str(task.get("task", "")) for task in planned if task.get("node") == name]
        rows.append(
            NodeRow(
                name,
                ready.hostname if ready is not None else "",
                ready.python if ready is not None else "",
                (ready.tensorflow or "none") if ready is not None else "",
                str(ready.cores) if ready is not None else "",
                ", ".join(ready.gpus) if ready is not None else "",
                ", ".join(tasks[:16]) + (f" and {len(tasks) - 16} more" if len(tasks) > 16 else ""),
            )
        )
    return rows


def _make_addresses(data: PageData) -> list[TaskAddress]:
    return [
        TaskAddress(
            str(task.get("task", "")),
            str(task.get("node", "")),
            f"{task.get('address', '')}:{task.get('port', '')}",
            cut(complete_command(data.plan, task), 4000),
        )
        for task in data.planned[:256]
    ]
