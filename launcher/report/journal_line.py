"""The parts of a line of events.jsonl that all lines have, and the messages to the user.

`run_events` defines all kinds of events. Their models take longer to import than `ls`, `logs` and `attach` take to run,
so these commands use only this module.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from worker_entry.protocol.frozen import dataclass

Level = Literal["note", "warning", "error"]


@dataclass(frozen=True)
class Message:
    """A message to the user, as the terminal shows it."""

    level: Level
    text: str


_RENAMED = {"said": "message", "stranger-refused": "connection-rejected"}
"""Kinds of events by their names in runs of format 1."""


class Line(NamedTuple):
    """One event. `time`: Unix seconds. `kind`: for example `task-started`. `facts`: the line's object, unchecked."""

    time: float
    attempt: int
    kind: str
    facts: Mapping[str, Any]

    @property
    def message(self) -> Message | None:
        """The message to the user, if the event is one; a note if its level is unknown."""
        if self.kind != "message":
            return None
        level = self.facts.get("level")
        return Message(level if level in ("warning", "error") else "note", str(self.facts.get("text", "")))


def parse_line(data: bytes) -> Line:
    """Parses a line.

    Raises:
        ValueError: the line is incomplete, or not a line of a journal.
    """
    try:
        facts = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    match facts:
        case {"time": bool()}:
            pass
        case {"time": int() | float() as moment, "attempt": int(attempt), "event": str(kind)}:
            with contextlib.suppress(OverflowError):
                return Line(float(moment), attempt, _RENAMED.get(kind, kind), facts)
    raise ValueError("not an event with its time and attempt")


def parse_lines(lines: Iterable[bytes]) -> Iterator[Line]:
    """Yields the lines in order; ignores those that are torn or malformed."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield parse_line(line)
