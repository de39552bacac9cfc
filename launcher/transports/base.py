"""What a transport is: it starts an agent on a node and carries frames; it decides nothing."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import Log, Message

OPEN_LOGS = 128
"""Mirrored logs that are open at once: a controller may have no more than 1,024 descriptors for everything."""


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

    @property
    def heard(self) -> float:
        """When the agent was last heard of, in monotonic seconds."""

    def send(self, message: Message, body: bytes = b"") -> None:
        """Sends a frame; never blocks, never fails: a broken link shows as LinkClosed."""

    def drop_if_silent(self, limit_s: float) -> None:
        """Closes a link over which nothing was heard for so long, although the agent may answer yet."""

    def close(self) -> int | None:
        """Ends the agent, forcibly if it must be; returns how many processes are left, None if that is unknown."""


class Transport(Protocol):
    """A way to a node. `shares_files`: the agent writes the logs where we read them, so that none need be sent."""

    shares_files: bool

    def connect(self, node: str, deliver: Deliver, mirror: LogSink, lease_s: float) -> Link:
        """Starts the agent; `deliver` hears of everything from then on, but log bytes, which go to `mirror`.

        A connection that breaks may be replaced until the agent has heard nothing for `lease_s`.

        Raises:
            OSError: it could not be started.
        """


class LogSink(Protocol):
    """Takes the log bytes of a node."""

    def write(self, frame: Log, data: bytes) -> bool:
        """Called from the link's own thread; false if it is of an attempt that is over, and was dropped.

        Raises:
            ProtocolError: the node cannot have written this.
            OSError: it cannot be written here.
        """


class LogMirror:
    """Writes the log bytes that agents send into the run's own files, each at its offset; from any thread.

    `path_of` maps an attempt and a task's name to a file; it raises ValueError for a name that is no task's.
    """

    def __init__(self, path_of: Callable[[int, str], Path]) -> None:
        self._path_of = path_of
        self._lock = threading.Lock()
        self._files: dict[tuple[int, str], _MirroredFile] = {}
        self._open: OrderedDict[_MirroredFile, None] = OrderedDict()
        """Those whose descriptors are open, but for ones that are just being written; used last, last."""
        self._attempt = 0
        self._closed = False

    def begin(self, attempt: int) -> None:
        """Closes the files of all attempts before this one; what still comes of them is dropped."""
        self._end(lambda key: key[0] < attempt)
        self._attempt = attempt

    def write(self, frame: Log, data: bytes) -> bool:
        """See LogSink; a piece that begins behind all that has come of its log cannot be."""
        key = frame.attempt, frame.task
        with self._lock:
            if self._closed or frame.attempt < self._attempt:
                return False
            file = self._files.get(key)
            if file is None:
                file = self._files[key] = _MirroredFile(self._path_of(*key))
        file.write(data, frame.offset)
        with self._lock:
            self._open[file] = None
            self._open.move_to_end(file)
            too_many = [self._open.popitem(last=False)[0] for _ in range(len(self._open) - OPEN_LOGS)]
        for other in too_many:
            other.close()
        return True

    def close(self) -> None:
        self._closed = True
        self._end(lambda _: True)

    def _end(self, over: Callable[[tuple[int, str]], bool]) -> None:
        with self._lock:
            ended = [self._files.pop(key) for key in [*self._files] if over(key)]
            for file in ended:
                self._open.pop(file, None)
        for file in ended:
            file.end()


class _MirroredFile:
    """One log; opened when it is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._size = 0
        self._ended = False

    def write(self, data: bytes, offset: int) -> None:
        with self._lock:
            if self._ended:
                return
            if offset > self._size:
                raise ProtocolError(f"a piece of a log at {offset:,}, of which it has sent {self._size:,} bytes")
            if self._descriptor is None:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            while data:
                written = os.pwrite(self._descriptor, data, offset)
                data, offset = data[written:], offset + written
            self._size = max(self._size, offset)

    def close(self) -> None:
        """Until it is written again."""
        with self._lock:
            self._close()

    def end(self) -> None:
        """It is not written any more."""
        with self._lock:
            self._ended = True
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
