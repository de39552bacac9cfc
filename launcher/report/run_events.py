"""The lines of events.jsonl, a run's journal: all events in order, one JSON object per line.

Each object has the `time` in Unix seconds by the controller's clock, the `attempt` (0 before the first), the kind of
the `event`, and the fields of that kind. An event that a node reported also has the `node` and the `frame`: the number
of the message on the node's link. The gang's events are complete, so that a later controller can replay them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, get_args

from pydantic import TypeAdapter

from launcher.gang import events as gang
from launcher.gang.restarts import AttemptOutcome
from launcher.report.journal_line import Line, Message, parse_line, parse_lines
from launcher.report.models import AttemptReport
from launcher.report.state_names import StateName
from launcher.tasks import TaskId
from launcher.verdict.models import OutcomeName
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Ready


@dataclass(frozen=True)
class RunStarted:
    """A controller has started; `generation`: the number of earlier controllers of the run.

    `written`: when the controller before was last known to run, in Unix seconds.
    """

    run_id: str
    name: str
    directory: str
    generation: int = 0
    written: float = 0.0


@dataclass(frozen=True)
class State:
    """The run's state has changed; `reference` and `message` say why, if known."""

    state: StateName
    reference: str = ""
    message: str = ""


@dataclass(frozen=True)
class LinkDropped:
    """The connection to a node has broken; its tasks continue."""

    node: str
    reason: str


@dataclass(frozen=True)
class LinkResumed:
    """The connection to a node is back, `after_s` seconds after the last data; nothing was lost."""

    node: str
    after_s: float


@dataclass(frozen=True)
class Straggler:
    """A task is slower than the others or, if `reason` is empty, no longer slower; `message` describes it.

    `score`: the others' median own time of a step, divided by the task's. `reason`: what is slow, as a phrase. Earlier
    versions recorded neither.
    """

    task: TaskId
    message: str
    score: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class ConnectionRejected:
    """A task's port has refused connections from this address outside the cluster; recorded once per address."""

    task: TaskId
    address: str
    count: int


@dataclass(frozen=True)
class NodeMet:
    """A node's agent has reported that it is ready."""

    node: str
    ready: Ready


@dataclass(frozen=True)
class Checkpoint:
    """A task has saved a file or folder of this name in the checkpoint directory."""

    name: str
    time: float


@dataclass(frozen=True)
class CompileCache:
    """The number of compile cache entries that a node's tasks have loaded in the attempt, and that they have added."""

    node: str
    loaded: int
    stored: int


@dataclass(frozen=True)
class AttemptEnded:
    """An attempt is over. `report`: its report, as in report.json. `ending`: the attempt's end for the restart rule."""

    report: AttemptReport
    ending: AttemptOutcome | None = None


@dataclass(frozen=True)
class Ended:
    """The run is over, and no process of it is known to be left."""

    outcome: OutcomeName
    exit_status: int
    reference: str
    message: str


RunEvent = (
    RunStarted
    | State
    | Message
    | NodeMet
    | LinkDropped
    | LinkResumed
    | Straggler
    | ConnectionRejected
    | Checkpoint
    | CompileCache
    | AttemptEnded
    | Ended
    | gang.Fact
)


@dataclass(frozen=True)
class Record:
    """One line. `node` and `frame` are empty for an event that no node reported."""

    time: float
    attempt: int
    event: RunEvent
    node: str = ""
    frame: int = 0


_ENVELOPE: dict[str, Any] = {
    "time": {"type": "number"},
    "attempt": {"type": "integer"},
    "node": {"type": "string"},
    "frame": {"type": "integer"},
}
_OF_EVENT = {"time": "at"}
"""New names of event fields whose names are taken: `time` is when the controller handled the event, `at` when it
happened."""


def kind_of(event: object) -> str:
    """The kind of an event in the journal, such as `task-started`."""
    return _kind(type(event))


def _kind(cls: type) -> str:
    """`TaskStarted` → `task-started`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


KINDS: dict[str, type] = {_kind(cls): cls for cls in get_args(RunEvent)}


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def render_record(record: Record) -> bytes:
    """Renders the line, with its line break."""
    cls: Any = type(record.event)
    line: dict[str, Any] = {"time": round(record.time, 6), "attempt": record.attempt, "event": _kind(cls)}
    if record.node:
        line |= {"node": record.node, "frame": record.frame}
    values = _adapter(cls).dump_python(record.event, mode="json")
    line |= {_OF_EVENT.get(name, name): value for name, value in values.items()}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def parse_record(line: bytes) -> Record | None:
    """Parses a line; returns None for a kind that this version does not know.

    Raises:
        ValueError: the line is incomplete, or not a line of a journal.
    """
    try:
        return make_record(parse_line(line))
    except ValueError as error:
        raise ValueError(f"not a line of a journal: {error}") from None


def parse_records(lines: Iterable[bytes]) -> Iterator[Record]:
    """Yields the records of a journal's lines, in order; ignores torn and malformed lines and unknown kinds."""
    return make_records(parse_lines(lines))


def make_records(lines: Iterable[Line]) -> Iterator[Record]:
    """Yields the records of the lines, in order; ignores malformed lines and unknown kinds."""
    for line in lines:
        with contextlib.suppress(ValueError):
            record = make_record(line)
            if record is not None:
                yield record


def make_record(line: Line) -> Record | None:
    """Makes the record of a line; returns None for a kind that this version does not know.

    Raises:
        ValueError: the line lacks the fields of its kind.
    """
    facts = line.facts
    cls: Any = KINDS.get(line.kind)
    if cls is None:
        return None
    try:
        names = {field.name for field in fields(cls)}
        values = {name: facts[stored] for name in names if (stored := _OF_EVENT.get(name, name)) in facts}
        event = _adapter(cls).validate_python(values, strict=False)
        node = str(facts["node"]) if "frame" in facts else ""
        return Record(line.time, line.attempt, event, node, int(facts.get("frame", 0)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a record: {error}") from None


def make_schema() -> dict[str, Any]:
    """The JSON Schema of a line."""
    shared: dict[str, Any] = {}
    kinds = []
    for kind, cls in KINDS.items():
        schema = _adapter(cls).json_schema(mode="serialization")
        shared |= schema.pop("$defs", {})
        own = {_OF_EVENT.get(name, name): facts for name, facts in schema.get("properties", {}).items()}
        required = [_OF_EVENT.get(name, name) for name in schema.get("required", [])]
        schema["properties"] = {**_ENVELOPE, "event": {"const": kind}, **own}
        schema["required"] = ["time", "attempt", "event", *required]
        kinds.append(schema)
    return {"title": "A line of events.jsonl", "anyOf": kinds, "$defs": shared}
