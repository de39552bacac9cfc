"""The lines of events.jsonl, a run's journal: everything that happened, in order, one JSON object a line.

Each object has the `time` in Unix seconds by the controller's clock, the `attempt` (0 before the first), the `event` by
its kind, and the kind's own fields. What a node reported also has the `node`, and the `frame`: the number of its
message on the node's link. The gang's events are complete, so that a later controller can replay them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from launcher.gang import events as gang
from launcher.gang.restarts import Ending
from launcher.report.models import AttemptReport
from launcher.tasks import TaskId
from launcher.verdict.models import OutcomeName
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Ready

StateName = Literal[
    "pending",
    "connecting",
    "forming",
    "running",
    "restarting",
    "waiting",
    "stopping",
    "succeeded",
    "failed",
    "interrupted",
]


@dataclass(frozen=True)
class RunStarted:
    """A controller has begun to work; `generation`: how many controllers the run has had before."""

    run_id: str
    name: str
    directory: str
    generation: int = 0


@dataclass(frozen=True)
class State:
    """The run's state has changed; `reference` and `message` say why, if that is known."""

    state: StateName
    reference: str = ""
    message: str = ""


@dataclass(frozen=True)
class Said:
    """A message to the user, as the terminal shows it."""

    level: Literal["note", "warning", "error"]
    text: str


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
    """A task is slower than the others, as the message says, or, without a reason, is no longer slower.

    `score`: the others' median own time of a step, divided by the task's. `reason`: what is slow, as a phrase. Earlier
    versions have recorded neither.
    """

    task: TaskId
    message: str
    score: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class StrangerRefused:
    """A task's port has refused connections from this address, which is not of the cluster; once for each address."""

    task: TaskId
    address: str
    count: int


@dataclass(frozen=True)
class NodeMet:
    """What a node's agent has said of itself."""

    node: str
    ready: Ready


@dataclass(frozen=True)
class Checkpoint:
    """A task has saved something of this name in the checkpoint directory."""

    name: str
    time: float


@dataclass(frozen=True)
class CompileCache:
    """How many entries of its compile cache a node's tasks have loaded in the attempt, and how many they have added."""

    node: str
    loaded: int
    stored: int


@dataclass(frozen=True)
class AttemptEnded:
    """An attempt is over; the report is that of report.json. `ending`: what the rule for restarts has to know of it."""

    report: AttemptReport
    ending: Ending | None = None


@dataclass(frozen=True)
class Ended:
    """The run is over, and nothing is left of it as far as is known."""

    outcome: OutcomeName
    exit_status: int
    reference: str
    message: str


RunEvent = (
    RunStarted
    | State
    | Said
    | NodeMet
    | LinkDropped
    | LinkResumed
    | Straggler
    | StrangerRefused
    | Checkpoint
    | CompileCache
    | AttemptEnded
    | Ended
    | gang.Event
)


@dataclass(frozen=True)
class Record:
    """One line. `node` and `frame` are empty for what no node has reported."""

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
"""Fields of events whose names are taken: `time` is when the controller handled the event, `at` when it happened."""


def kind_of(event: object) -> str:
    """`task-started`: how the lines of the journal name an event like this."""
    return _kind(type(event))


def _kind(cls: type) -> str:
    """`TaskStarted` → `task-started`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()


KINDS: dict[str, type] = {_kind(cls): cls for cls in get_args(RunEvent)}


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def render_record(record: Record) -> bytes:
    """The line, with its line break."""
    cls: Any = type(record.event)
    line: dict[str, Any] = {"time": round(record.time, 6), "attempt": record.attempt, "event": _kind(cls)}
    if record.node:
        line |= {"node": record.node, "frame": record.frame}
    values = _adapter(cls).dump_python(record.event, mode="json")
    line |= {_OF_EVENT.get(name, name): value for name, value in values.items()}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def parse_record(line: bytes) -> Record | None:
    """The record; None for a kind that this version does not know.

    Raises:
        ValueError: the line is not complete, or not one of a journal.
    """
    try:
        return make_record(json.loads(line))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a line of a journal: {error}") from None


def parse_records(lines: Iterable[bytes]) -> Iterator[Record]:
    """The records of a journal's lines, in order. Lines that are torn, strange or of no known kind are ignored."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            record = parse_record(line)
            if record is not None:
                yield record


def make_record(facts: Mapping[str, Any]) -> Record | None:
    """The record of a line's object; None for a kind that this version does not know.

    Raises:
        ValueError: the object is not one of a journal.
    """
    try:
        cls = KINDS.get(facts["event"])
        if cls is None:
            return None
        names = {field.name for field in fields(cls)}
        values = {name: facts[stored] for name in names if (stored := _OF_EVENT.get(name, name)) in facts}
        event = _adapter(cls).validate_python(values, strict=False)
        node = str(facts["node"]) if "frame" in facts else ""
        return Record(float(facts["time"]), int(facts["attempt"]), event, node, int(facts.get("frame", 0)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no record: {error}") from None


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
