"""What a field of a message may hold: declared with the field, checked where a frame is decoded (`protocol.parse`).

A number, a name or a list that is out of its limits is an error of the sender. Free text is not: it may come from a
user's program, so it is made well-formed and cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

LARGEST = 1 << 53
"""Of whole numbers; each of them is exact as a float, too."""
FLOAT_LIMIT = 1e15
"""No time in seconds is as long."""
BODY_LIMIT = 1 << 20
"""Bytes of a frame's body at the most; longer content is sent in pieces."""


class Limit:
    """Stands in the annotation of a field; `take` returns the value as the field will hold it."""

    def take(self, value: Any) -> Any:
        """Raises ValueError if the field cannot hold it."""
        return value


@dataclass(frozen=True)
class Within(Limit):
    least: int
    most: int

    def take(self, value: int) -> int:
        if not self.least <= value <= self.most:
            raise ValueError(f"{value} is not within {self.least} and {self.most}")
        return value


@dataclass(frozen=True)
class Text(Limit):
    """Free text, which may have several `lines`; half characters, which stand for bytes, are written as escapes."""

    most: int
    lines: bool = True

    def take(self, value: str) -> str:
        if not value.isascii():
            value = value.encode("utf-8", "backslashreplace").decode()
        if not self.lines:
            value = " ".join(value.splitlines())
        return value if len(value) <= self.most else f"{value[: self.most - 1]}…"


@dataclass(frozen=True)
class Matches(Limit):
    """A name with a syntax; `what` says which. No name has more than 256 characters."""

    pattern: str
    what: str
    barred: tuple[str, ...] = ()

    def take(self, value: str) -> str:
        if len(value) > 256 or value in self.barred or re.fullmatch(self.pattern, value) is None:
            raise ValueError(f"{value[:80]!r} is no {self.what}")
        return value


@dataclass(frozen=True)
class Path(Limit):
    """What the system takes as a path, or as a part of one: file names are bytes, so half characters stay."""

    most: int = 4096

    def take(self, value: str) -> str:
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ValueError(f"{value[:80]!r} is no path") from None
        if len(value) > self.most or "\0" in value:
            raise ValueError(f"{value[:80]!r} is no path")
        return value


@dataclass(frozen=True)
class Items(Limit):
    """A list or an object with so many items at the most."""

    most: int

    def take(self, value: Collection[Any]) -> Collection[Any]:
        if len(value) > self.most:
            raise ValueError(f"{len(value)} items, of which {self.most} are allowed")
        return value


@dataclass(frozen=True)
class ExactlyOne(Limit):
    """An object of whose fields one is given, and the others are null."""

    names: tuple[str, ...]

    def take(self, value: Any) -> Any:
        if sum(getattr(value, name) is not None for name in self.names) != 1:
            raise ValueError(f"one of {' and '.join(self.names)} is needed, and one alone")
        return value


class OfSender(Limit):
    """Marks the name of a task for which only the node may speak that the task was placed on."""


class OfAttempt(Limit):
    """Marks the number of the attempt that a message belongs to."""


Count = Annotated[int, Within(0, LARGEST)]
Number = Annotated[int, Within(-LARGEST, LARGEST)]
"""What a user's program counts."""
Pid = Annotated[int, Within(1, 1 << 31)]
Port = Annotated[int, Within(1, 65535)]

Name = Annotated[str, Text(256)]
Line = Annotated[str, Text(8192)]
Prose = Annotated[str, Text(32_768)]
"""Several lines, such as the message of an exception."""

TaskName = Annotated[str, Matches(r"(?:chief|worker|ps|evaluator|tensorboard):(?:0|[1-9][0-9]{0,5})", "task")]
OwnTask = Annotated[TaskName, OfSender()]
Attempt = Annotated[int, Within(0, 1 << 31), OfAttempt()]
"""0 before the first."""
