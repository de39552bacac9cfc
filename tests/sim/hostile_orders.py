"""A real agent whose controller sends anything, but nothing that reaches outside a folder or off this machine."""

from __future__ import annotations

import contextlib
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import worker_entry
from tests.benchmarks.peaks import peak_rss
from tests.sim.hostile_frames import TEXTS, RandomFrames
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import Broken, Ready, ToController
from worker_entry.protocol.orders import (
    VERSION,
    Beat,
    Dial,
    Goodbye,
    Hello,
    Inspect,
    Piece,
    Preload,
    Prepare,
    ShowStacks,
    Start,
    Stop,
)

ENTRY = str(Path(worker_entry.__file__).parent)
OFTEN = (Beat, Piece, ShowStacks)
SELDOM = (*[Prepare] * 1000, Dial, Inspect, Preload, Start, Stop, Hello, Goodbye)
"""Each of these except Prepare ends the agent, or makes it start a process."""
AT_ONCE = 200
PLACES = ("127.0.0.1", "::1", "[::1]", "\0", "a\0b", "\ud83d", "127.0.0.1 ")
"""Hosts to dial: none of them causes a query to a name server."""


class Abused:
    """An agent; `feed` sends it frames until it ends or has read `count` frames."""

    def __init__(self, folder: Path, seed: int, spoiled: float) -> None:
        self.taken = 0
        self._chance = random.Random(seed)
        self._folder = folder
        self._frames = RandomFrames(self._chance, [*OFTEN * 4000, *SELDOM], ["worker:0", "worker:1"], spoiled)
        self._decoder = Decoder(ToController)
        self._raw = b""
        self._agent = 0
        self.peak_kib = 0
        """Peak memory of the agent itself, up to its last answer."""
        folder.mkdir()
        with (folder / "stderr").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, ENTRY, "agent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                start_new_session=True,
            )

    def feed(self, count: int) -> None:
        if not self._send(encode(Hello(VERSION, "run", str(self._folder / "run"), str(self._folder), 60.0, True))):
            return
        while self.taken < count:
            frames = b"".join(self._frames.draw(self._tame) for _ in range(AT_ONCE))
            mark = float(self.taken + 1)
            if not self._send(frames + encode(Beat(mark, 0))) or not self._await(mark):
                return
            self.taken += AT_ONCE

    def end(self) -> str:
        """Waits for the agent's end; returns what it did wrong, or an empty text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        status = self._process.wait(60)
        said = (self._folder / "stderr").read_text(errors="replace")
        return said if "Traceback" in said else "" if status in (0, 1) else f"it ended with {status}: {said}"

    def _tame(self, header: dict[str, Any]) -> None:
        kind = header["type"]
        if kind == "Beat":
            header["received"] = 0
        elif kind == "Dial":
            for target in header["targets"]:
                target["host"] = self._chance.choice(PLACES)
        elif kind == "MeasureLink":
            header["target"]["host"] = self._chance.choice(PLACES)
        elif kind == "Preload":
            header["modules"] = ["json", *self._chance.sample(TEXTS[:6], 2)]
        elif kind == "Prepare":
            header["tunnel"] = None  # an agent that is not isolated ends
        if "shared" in header:
            header["shared"] = self._chance.choice((str(self._folder), "\0", "no/such", f"{self._folder}/\udce9"))

    def _send(self, data: bytes) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _await(self, mark: float) -> bool:
        """Waits for the answer to that beat; False if the agent has ended."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if not select.select([self._process.stdout], [], [], 60)[0]:
                break
            data = os.read(self._process.stdout.fileno(), 1 << 18)
            if not data:
                return False
            if len(self._raw) < len(MARKER):
                self._raw += data
                data, self._raw = self._raw[len(MARKER) :], self._raw[: len(MARKER)]
            self._note_memory()
            messages = [message for message, _ in self._decoder.feed(data)]
            self._agent = next((message.pid for message in messages if isinstance(message, Ready)), self._agent)
            if any(isinstance(message, Broken) for message in messages):
                return False
            if any(isinstance(message, Beat) and message.echo == mark for message in messages):
                return True
        raise AssertionError("the agent does not answer")

    def _note_memory(self) -> None:
        self.peak_kib = max(self.peak_kib, peak_rss([self._agent]) >> 10)
