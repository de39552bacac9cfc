"""Limits of message fields: declared with each field, checked when a frame is decoded (`framing.parse`).

A number, a name or a list that exceeds its limits is the sender's error. Free text may come from a user's program, so
it is made well-formed and truncated instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any

from worker_entry.protocol.frozen import dataclass

LARGEST = 1 << 53
"""The largest integer; floats represent all integers up to it exactly."""
FLOAT_LIMIT = 1e15
"""Floats must be smaller; no time in seconds is this large."""
BODY_LIMIT = 1 << 20
"""Maximum size of a frame's body in bytes; longer content is sent in pieces."""


class Limit:
    """Part of a field's annotation; `take` checks a value and returns the value to store."""

    def take(self, value: Any) -> Any:
        """Returns the value to store; raises ValueError if the field cannot hold the value."""
        return value


@dataclass(frozen=True)
class Within(Limit):
    least: int
    most: int

    def take(self, value: float) -> float:
        if not self.least <= value <= self.most:
            raise ValueError(f"{value} is not between {self.least} and {self.most}")
        return value


@dataclass(frozen=True)
class Text(Limit):
    """Free text, with line breaks if `lines` is set; lone surrogates, which stand for bytes, are escaped."""

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
    """A name that matches a pattern, called `what` in errors; at most 256 characters."""

    pattern: str
    what: str
    barred: tuple[str, ...] = ()

    def take(self, value: str) -> str:
        if len(value) > 256 or value in self.barred or re.fullmatch(self.pattern, value) is None:
            raise ValueError(f"{value[:80]!r} is not a {self.what}")
        return value


@dataclass(frozen=True)
class Path(Limit):
    """A valid path, or part of one; file names are bytes, so lone surrogates are kept."""

    most: int = 4096

    def take(self, value: str) -> str:
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise ValueError(f"{value[:80]!r} is not a path") from None
        if len(value) > self.most or "\0" in value:
            raise ValueError(f"{value[:80]!r} is not a path")
        return value


@dataclass(frozen=True)
class InnerPath(Path):
    """The path of a file in a folder, without `.` and `..`."""

    def take(self, value: str) -> str:
        if any(part in ("", ".", "..") for part in value.split("/")):
            raise ValueError(f"{value[:80]!r} is not a path in a folder")
        return super().take(value)


@dataclass(frozen=True)
class Items(Limit):
    """A list or an object with a maximum number of items."""

    most: int

    def take(self, value: Collection[Any]) -> Collection[Any]:
        if len(value) > self.most:
            raise ValueError(f"{len(value)} items; at most {self.most} are allowed")
        return value


@dataclass(frozen=True)
class ExactlyOne(Limit):
    """An object with exactly one field that is not null."""

    names: tuple[str, ...]

    def take(self, value: Any) -> Any:
        if sum(getattr(value, name) is not None for name in self.names) != 1:
            raise ValueError(f"exactly one of {' and '.join(self.names)} must be given")
        return value


class OfSender(Limit):
    """Marks a task's name; only the node on which the task was placed may send it."""


class OfAttempt(Limit):
    """Marks the number of the attempt that a message belongs to."""


Count = Annotated[int, Within(0, LARGEST)]
Amount = Annotated[float, Within(0, 10**15 - 1)]
"""Seconds, watts, a share: a measured quantity."""
Number = Annotated[int, Within(-LARGEST, LARGEST)]
"""A number that a user's program reports."""
Pid = Annotated[int, Within(1, 1 << 31)]
Port = Annotated[int, Within(1, 65535)]

NetworkName = Annotated[str, Matches(r"[0-9a-fA-F:.]{2,45}(?:/[0-9]{1,3})?", "network")]
Name = Annotated[str, Text(256)]
Line = Annotated[str, Text(8192)]
Prose = Annotated[str, Text(32_768)]
"""Longer text, such as the message of an exception."""

TaskName = Annotated[str, Matches(r"(?:chief|worker|ps|evaluator|tensorboard):(?:0|[1-9][0-9]{0,5})", "task")]
OwnTask = Annotated[TaskName, OfSender()]
Attempt = Annotated[int, Within(0, 1 << 31), OfAttempt()]
"""0 before the first attempt."""
