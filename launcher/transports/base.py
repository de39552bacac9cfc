"""What a transport is: it starts an agent on a node and carries frames; it decides nothing."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from worker_entry.messages import Log, Message
from worker_entry.protocol import MARKER, Decoder, ProtocolError, encode

NOISE_LIMIT = 64 << 10
"""Bytes before the start marker that are kept for an error message."""


@dataclass(frozen=True)
class LinkClosed:
    """The agent's stream has ended: it is gone, or it was broken."""

    reason: str


class LinkError(Exception):
    """There is no way to the node, or none any more; the text says why, for the user."""


Deliver = Callable[[str, Message | LinkClosed], None]
"""Takes what arrives from a node; called from the link's own thread."""


class Link(Protocol):
    """A started agent."""

    def send(self, message: Message) -> None:
        """Sends a frame; never blocks, never fails: a broken link shows as LinkClosed."""

    def close(self) -> int | None:
        """Ends the agent, forcibly if it must be; returns how many processes are left, None if that is unknown."""


class Transport(Protocol):
    """A way to a node. `shares_files`: the agent writes the logs where we read them, so that none need be sent."""

    shares_files: bool

    def connect(self, node: str, deliver: Deliver, mirror: LogMirror) -> Link:
        """Starts the agent; `deliver` hears of everything from then on, but log bytes, which go to `mirror`.

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


class Stream(Protocol):
    """Bytes to and from an agent; every method may block, and raises OSError when the link is broken."""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the agent's end."""

    def write(self, data: bytes) -> None:
        """All of the data."""

    def finish(self) -> None:
        """Ends our side; the agent's may go on."""


class Frames:
    """Frames over a stream: one thread opens it, reads and delivers, one writes what is queued.

    `open_stream` may take its time; it raises LinkError when there is no way to the node.
    """

    def __init__(self, node: str, open_stream: Callable[[], Stream], deliver: Deliver, mirror: LogMirror) -> None:
        self._node = node
        self._mirror = mirror
        self._open_stream = open_stream
        self._deliver = deliver
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"read-{node}", daemon=True)
        self._reader.start()

    def send(self, message: Message) -> None:
        self._outgoing.put(encode(message))

    def finish(self) -> None:
        """Closes our side once everything queued is written; the agent reads that as our end."""
        self._outgoing.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits until the agent's side has ended."""
        self._reader.join(timeout_s)

    def _write(self, stream: Stream) -> None:
        try:
            while (data := self._outgoing.get()) is not None:
                stream.write(data)
        except OSError:
            pass  # the reader sees the end as well, and says so
        finally:
            with contextlib.suppress(OSError):
                stream.finish()

    def _read(self) -> None:
        reason = "the agent ended"
        try:
            stream = self._open_stream()
            threading.Thread(target=self._write, args=(stream,), name=f"write-{self._node}", daemon=True).start()
            data = self._skip_noise(stream)  # and empty, when the marker came alone
            decoder = Decoder()
            while True:
                for message, body in decoder.feed(data):
                    if isinstance(message, Log):
                        self._mirror.write(message, body)
                    else:
                        self._deliver(self._node, message)
                data = stream.read(1 << 18)
                if not data:
                    break
        except LinkError as error:
            reason = str(error)
        except (ProtocolError, ValueError, OverflowError) as error:
            reason = f"the agent sent {error}"
        except OSError as error:
            reason = f"its log cannot be written: {error.strerror}"
        except Exception as error:  # noqa: BLE001 - a thread that dies in silence would leave the run waiting
            reason = f"a bug in distlaunch: {error!r}"
        self._deliver(self._node, LinkClosed(reason))

    def _skip_noise(self, stream: Stream) -> bytes:
        noise = b""
        while MARKER not in noise:
            data = stream.read(1 << 16)
            if not data:
                shown = noise[-400:].decode(errors="replace").strip()
                raise ProtocolError(f"no start marker{f', only: {shown}' if shown else ''}")
            # What comes before the marker is a shell's chatter; its end may hold the marker's beginning.
            noise = (noise + data)[-NOISE_LIMIT - len(MARKER) - len(data) :]
        return noise.partition(MARKER)[2]
