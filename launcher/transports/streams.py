"""Bytes to and from what was started on a node, up to its first word."""

from __future__ import annotations

import time
from typing import Protocol

from launcher.transports.base import LinkBroken, LinkError
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.messages import Message, ToController

FIRST_WORD_S = 60.0
"""How long an agent may take to start: an interpreter on a network file system is slow at first."""
NOISE_LIMIT = 64 << 10
"""Bytes before the start marker that are kept for an error message."""


class Stream(Protocol):
    """Bytes to and from an agent; every method may block."""

    def read(self, size: int, timeout_s: float) -> bytes:
        """Up to `size` bytes; empty at the agent's end, of which `how_ended` then tells.

        Raises:
            LinkBroken: nothing came for so long, or the way is broken.
        """

    def write(self, data: bytes) -> None:
        """All of the data; raises OSError when the way is broken."""

    def finish(self) -> None:
        """Ends our side; the agent's may go on."""

    def abandon(self) -> None:
        """Closes both sides without waiting for anything."""

    def how_ended(self) -> str:
        """Why the agent's side ended, for the user."""

    def exit_status(self) -> int | None:
        """The status with which it ended, where that says something."""


class NoAgentError(ProtocolError):
    """What was started has ended, and never was an agent."""


def skip_noise(stream: Stream, within_s: float, silent: str = "the agent does not start") -> bytes:
    """What follows the start marker; before it is a shell's chatter, whose end may hold the marker's beginning.

    Args:
        stream: where to read.
        within_s: how long the marker may take.
        silent: what is said of one that does not come in time.
    """
    noise = b""
    deadline = time.monotonic() + within_s
    while MARKER not in noise:
        try:
            data = stream.read(1 << 16, max(deadline - time.monotonic(), 0.01))
        except LinkBroken as broken:
            raise LinkError(f"{silent}: {broken}{_shown(noise)}") from None
        if not data:
            status = stream.exit_status()
            ended = f" (its login shell ended with status {status})" if status is not None else ""
            raise NoAgentError(f"no start marker{ended}{_shown(noise)}")
        if time.monotonic() > deadline:
            raise ProtocolError(f"no start marker{_shown(noise)}")
        noise = (noise + data)[-NOISE_LIMIT - len(MARKER) - len(data) :]
    return noise.partition(MARKER)[2]


def ask(stream: Stream, question: Message, timeout_s: float) -> Message:
    """Sends a question to whom has just been started, and returns the answer.

    Raises:
        LinkError: there is none.
    """
    try:
        stream.write(encode(question))
        data = skip_noise(stream, FIRST_WORD_S)
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
    text = noise[-400:].decode(errors="replace").strip()
    return f", only: {text}" if text else ""
