"""What a transport is: it starts an agent on a node and carries frames; it decides nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from worker_entry.messages import Log, Message


@dataclass(frozen=True)
class LinkClosed:
    """The agent is gone, or we no longer know what it does."""

    reason: str


@dataclass(frozen=True)
class LinkDropped:
    """The way to the agent broke; another is being looked for, as long as the agent waits for us."""

    reason: str


@dataclass(frozen=True)
class LinkResumed:
    """There is a way again, `after_s` seconds after the last word over the old one; nothing was lost."""

    after_s: float


@dataclass(frozen=True)
class LinkNote:
    """Something that the user should know."""

    text: str


LinkNews = LinkClosed | LinkDropped | LinkResumed | LinkNote


class LinkError(Exception):
    """There is no way to the node, or none any more; the text says why, for the user."""


class LinkBroken(Exception):  # noqa: N818 - the state of a way, of which there may be another
    """This way to the agent does not work any more; the agent may well go on."""


Deliver = Callable[[str, Message | LinkNews], None]
"""Takes what arrives from a node; called from the link's own thread."""


class Link(Protocol):
    """A started agent."""

    @property
    def clock_offset_s(self) -> float:
        """How far the node's clock is ahead of ours, as far as is known."""

    def send(self, message: Message, body: bytes = b"") -> None:
        """Sends a frame; never blocks, never fails: a broken link shows as LinkClosed."""

    def drop_if_silent(self, limit_s: float) -> None:
        """Closes a link over which nothing was heard for so long, although the agent may answer yet."""

    def close(self) -> int | None:
        """Ends the agent, forcibly if it must be; returns how many processes are left, None if that is unknown."""


class Transport(Protocol):
    """A way to a node. `shares_files`: the agent writes the logs where we read them, so that none need be sent."""

    shares_files: bool

    def connect(self, node: str, deliver: Deliver, mirror: LogMirror, lease_s: float) -> Link:
        """Starts the agent; `deliver` hears of everything from then on, but log bytes, which go to `mirror`.

        A connection that breaks may be replaced until the agent has heard nothing for `lease_s`.

        Raises:
            OSError: it could not be started.
        """


class LogMirror:
    """Writes the log bytes that agents send into the run's own files, each at its offset.

    `path_of` maps an attempt and a task's name to a file; it raises ValueError for a name that is no task's.
    """

    def __init__(self, path_of: Callable[[int, str], Path]) -> None:
        self._path_of = path_of
        self._files: dict[tuple[int, str], int] = {}

    def write(self, frame: Log, data: bytes) -> None:
        key = frame.attempt, frame.task
        if key not in self._files:
            path = self._path_of(*key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files[key] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        offset = frame.offset
        while data:
            written = os.pwrite(self._files[key], data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
