"""Bytes to and from a process that was started on a node, up to its start marker."""

from __future__ import annotations

import contextlib
import re
import select
from socket import socket
from typing import IO, Protocol

from launcher.clock import SystemTiming, Timing
from launcher.transports.base import LinkBroken, LinkError
from worker_entry.bootstrap.install import HERE, MISSING
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.messages import Message, ToController

FIRST_WORD_S = 60.0
"""How long an agent may take to start: an interpreter on a network file system starts slowly."""
NOISE_LIMIT = 64 << 10
"""Bytes before the start marker that are kept for an error message."""


def await_readable(file: IO[bytes] | socket, timeout_s: float) -> bool:
    """Whether there is data or the end to read in time; also for descriptors too large for `select`."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


ECHO = b"worker_entry on a node"
"""A part of the first bytes to a node; only a terminal sends it back."""


class Stream(Protocol):
    """Bytes to and from an agent; every method may block."""

    @property
    def archive(self) -> bytes:
        """worker_entry, for a node that may lack it; empty if the agent was started from a copy there."""

    def read(self, size: int, timeout_s: float) -> bytes:
        """Up to `size` bytes; empty at the agent's end, which `how_ended` then describes.

        Raises:
            LinkBroken: no data came for `timeout_s`, or the connection is broken.
        """

    def write(self, data: bytes) -> None:
        """Writes all of the data; raises OSError if the connection is broken."""

    def finish(self) -> None:
        """Closes our side; the agent's may stay open."""

    def abandon(self) -> None:
        """Closes both sides without waiting."""

    def how_ended(self) -> str:
        """Why the agent's side ended, for the user."""

    def exit_status(self) -> int | None:
        """The exit status of the agent's side; None if it has no meaning."""


class NoAgentError(ProtocolError):
    """The started process ended without becoming an agent."""


class NoPythonError(LinkError):
    """The node has no Python that an agent can run on, according to our own command line."""


_SILENT = "the agent does not start"
_INSTALL_PYTHON = "or install Python 3.9 or newer there, as with: sudo apt install python3"
_OWN_WORDS = re.compile(rb"^distlaunch: (.+?)\r?$", re.MULTILINE)
"""The message that the command line of `payload` prints before it gives up."""


def bring_archive(stream: Stream, within_s: float, silent: str = _SILENT, *, timing: Timing | None = None) -> None:
    """Brings worker_entry to a node that lacks it; nothing may be written meanwhile. Raises like `skip_noise`."""
    timing = timing or SystemTiming()
    deadline = timing.monotonic() + within_s
    if not stream.archive or _is_there(stream, deadline, silent, timing):
        return
    _write_aside(stream, stream.archive, timing)
    if not _is_there(stream, deadline, silent, timing):
        raise ProtocolError("another request for worker_entry")


def _write_aside(stream: Stream, data: bytes, timing: Timing) -> None:
    """Writes in a thread of its own, so that the reader can give up a process that does not read."""

    def write() -> None:
        with contextlib.suppress(OSError):  # the reader sees the break, too
            stream.write(data)

    timing.start(write, "write-aside")


def _is_there(stream: Stream, deadline: float, silent: str, timing: Timing) -> bool:
    """Whether the node says that it has worker_entry; skips a shell's output before that, reads no byte after it."""
    noise = b""
    while not noise.endswith((HERE, MISSING)):
        begun = max(length for length in range(len(HERE)) if noise.endswith((HERE[:length], MISSING[:length])))
        noise = _read_noise(stream, noise, len(HERE) - begun, deadline, silent, timing)
    return noise.endswith(HERE)


def skip_noise(stream: Stream, within_s: float, silent: str = _SILENT, *, timing: Timing | None = None) -> bytes:
    """The bytes after the start marker; skips a shell's output before it, which may split the marker between reads.

    Args:
        stream: where to read.
        within_s: the time limit.
        silent: the error if the marker does not come in time.
        timing: the clock of the time limit.

    Raises:
        LinkError: no more data came in time.
        NoAgentError: the process ended.
        ProtocolError: other data kept coming until then.
    """
    noise, timing = b"", timing or SystemTiming()
    deadline = timing.monotonic() + within_s
    while MARKER not in noise:
        noise = _read_noise(stream, noise, 1 << 16, deadline, silent, timing)
    return noise.partition(MARKER)[2]


def _read_noise(stream: Stream, noise: bytes, size: int, deadline: float, silent: str, timing: Timing) -> bytes:
    """The noise and up to `size` more bytes."""
    try:
        data = stream.read(size, max(deadline - timing.monotonic(), 0.01))
    except LinkBroken as broken:
        raise LinkError(f"{silent}: {broken}{_shown(noise)}") from None
    if ECHO in noise:
        raise LinkError(f"{silent}{_shown(noise)}")
    if not data:
        if (said := _OWN_WORDS.search(noise)) is not None:
            raise NoPythonError(f"{said[1].decode(errors='replace')}; set `python:` for this node, {_INSTALL_PYTHON}")
        status = stream.exit_status()
        ended = f" (its login shell ended with status {status})" if status is not None else ""
        raise NoAgentError(f"no start marker{ended}{_shown(noise)}")
    if timing.monotonic() > deadline:
        raise ProtocolError(f"no start marker{_shown(noise)}")
    return (noise + data)[-NOISE_LIMIT - len(MARKER) - len(data) :]


def ask(stream: Stream, question: Message, timeout_s: float, *, timing: Timing | None = None) -> Message:
    """Sends a question to a process that was just started, and returns the answer.

    Raises:
        LinkError: no answer came.
    """
    timing = timing or SystemTiming()
    try:
        bring_archive(stream, FIRST_WORD_S, timing=timing)
        _write_aside(stream, encode(question), timing)
        data = skip_noise(stream, FIRST_WORD_S, timing=timing)
        decoder = Decoder(ToController)
        while True:
            for message, _ in decoder.feed(data):
                return message
            data = stream.read(1 << 16, timeout_s)
            if not data:
                raise LinkError("it ended without an answer")
    except (LinkBroken, ProtocolError, OSError) as error:
        raise LinkError(f"no answer: {error}") from None
    finally:
        stream.abandon()


def _shown(noise: bytes) -> str:
    if ECHO in noise:
        return ": what we send comes back, so the command has a terminal; it needs plain pipes"
    text = noise[-400:].decode(errors="replace").strip()
    return f", only: {text}" if text else ""
