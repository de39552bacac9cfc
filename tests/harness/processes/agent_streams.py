"""Streams to an agent: one where the test plays the agent, and one to a real agent whose connection can be cut."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import worker_entry
from launcher.transports import resumable_link
from launcher.transports.base import LinkBroken
from tests.harness.polling import eventually
from worker_entry.protocol.framing import Decoder, encode
from worker_entry.protocol.messages import Message, Ready
from worker_entry.protocol.orders import VERSION, Attach, Beat

if TYPE_CHECKING:
    import pytest  # which the driver of test_takeover.py does without

STATUS_S = 1.0
ENTRY = str(Path(worker_entry.__file__).parent)
READY = Ready(VERSION, 1, "gpu-a", "3.11.0", "/usr/bin/python3", 0.0, 2, [], None, reattach_folder="/tmp/agent-x")


def beat_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes new links beat every 0.1 s; a short lease does so, too, but may expire on a busy machine."""
    monkeypatch.setattr(resumable_link, "BEAT_S", 0.1)


@dataclass
class FarEnd:
    """A stream whose other side is the test; `abandon` breaks it."""

    archive: bytes = b""
    from_agent: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    to_agent: bytearray = field(default_factory=bytearray)
    is_cut: bool = False

    def read(self, size: int, timeout_s: float) -> bytes:
        try:
            data = self.from_agent.get(timeout=timeout_s)
        except queue.Empty:
            raise LinkBroken("nothing came") from None
        if data is None:
            raise LinkBroken("the connection broke")
        return data

    def write(self, data: bytes) -> None:
        if self.is_cut:
            raise BrokenPipeError
        self.to_agent += data

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        self.is_cut = True

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return None

    def say(self, *messages: Message) -> None:
        self.from_agent.put(b"".join(map(encode, messages)))

    def heard(self) -> list[Message]:
        return [message for message, _ in Decoder().feed(bytes(self.to_agent)) if not isinstance(message, Beat)]

    def attach(self) -> Attach:
        """The controller's Attach, for which it waits."""

        def look() -> Attach:
            heard = self.heard()
            assert heard
            assert isinstance(heard[0], Attach)
            return heard[0]

        return eventually(look)


class Pipes:
    """A started `worker_entry`, in the role that the verb names."""

    archive = b""

    def __init__(self, verb: str, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, ENTRY, verb],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin, self.process.stdout
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True
        self._close_input()

    def _close_input(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # the last bytes can no longer be flushed
            self._in.close()

    def read(self, size: int, timeout_s: float) -> bytes:
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            if self.is_cut:
                raise LinkBroken("cut")
            if select.select([self._out], [], [], 0.02)[0]:
                data = os.read(self._out.fileno(), size)
                if not data and not self.is_cut and not self._has_status():
                    raise LinkBroken("the connection broke")
                if data or not self.is_cut:
                    return data
        raise LinkBroken("nothing came")

    def _has_status(self) -> bool:
        """Whether the process has ended by itself, as over SSH."""
        try:
            return self.process.wait(STATUS_S) >= 0
        except subprocess.TimeoutExpired:
            return False

    def write(self, data: bytes) -> None:
        try:
            self._in.write(data)
            self._in.flush()
        except ValueError:  # closed
            raise BrokenPipeError from None

    def finish(self) -> None:
        self._close_input()

    def abandon(self) -> None:
        self.cut()
        self._out.close()

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return None
