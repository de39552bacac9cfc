"""Whole runs with an honest node and one that sends anything; only the nodes are fake."""

from __future__ import annotations

import os
import queue
import random
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from launcher.console.terminal import NowhereSink
from launcher.console.writer import Console
from launcher.controller.collect.collector import Collector
from launcher.controller.context import RunContext
from launcher.controller.goodput import watch_goodput
from launcher.controller.links import NodeLinks
from launcher.controller.nodes import Recovered
from launcher.controller.supervisor import Supervisor
from launcher.plan.planner import Planner
from launcher.report.models import RunReport
from launcher.rundir.directory import RunDir
from launcher.rundir.journal import Journal
from launcher.signals import Interrupts
from launcher.spec.models import ClusterSpec
from launcher.transports.base import Deliver, FileSink, LinkBroken, LinkClosed, LinkNews, Resumption
from launcher.transports.resumable_link import ResumableLink
from tests.sim.hostile_frames import RandomFrames
from tests.sim.nodes import Answers
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import (
    Attached,
    Broken,
    Exited,
    Log,
    Message,
    Ready,
    Refused,
    Returned,
    Started,
    ToController,
)
from worker_entry.protocol.orders import Beat, Goodbye, Start, Stop, ToAgent
from worker_entry.protocol.resend_buffer import is_counted

SPEC = {
    "nodes": [{"host": "honest", "tasks": {"worker": 2}}, {"host": "hostile", "tasks": {"worker": 2}}],
    "program": {"script": "train.py"},
    "restart": {"max_restarts": 1_000_000, "pause_s": 0.0, "return_s": 0.0},
    "timeouts": {"drain_s": 0.02, "start_s": 60.0, "stop_grace_s": 0.1},
}
ENDING = (Ready, Attached, Refused, Broken, Beat, Exited, Returned)
AT_ONCE = 500
BURST = 20_000
"""Most frames that a hostile node sends in one attempt; then it sends a line that ends its link."""


class FarAgent:
    """The far end of a link: it answers as an agent does, and mixes in frames that `hostile` draws."""

    archive = b""

    def __init__(self, tally: Tally, chance: random.Random, hostile: RandomFrames | None, lie: bytes = b"") -> None:
        self._tally = tally
        self._chance = chance
        self._hostile = hostile
        self._lie = lie
        self._decoder = Decoder(ToAgent)
        self._say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._say.put(MARKER)
        self._honest = Answers()
        self._left = self._drawn = self._received = 0

    # --- a stream to the controller ---

    def read(self, size: int, timeout_s: float) -> bytes:
        self._tally.frames += self._drawn  # the controller has read all of them
        self._drawn = 0
        try:
            data = self._say.get(timeout=timeout_s) if not self._left else self._say.get_nowait()
        except queue.Empty:
            if not self._left:
                raise LinkBroken("nothing came") from None
            data = b"".join(self._draw() for _ in range(min(AT_ONCE, self._left)))
            data += b"enough\n" if not self._left else b""
        return b"" if data is None else data

    def write(self, data: bytes) -> None:
        for message, _ in self._decoder.feed(data):
            self._received += is_counted(message)
            for answer in self._answers(message):
                self._say.put(encode(answer, b"x" * getattr(answer, "length", 0)))
                if self._hostile is not None and self._chance.random() < 0.3:
                    self._say.put(self._draw())
            if self._lie and isinstance(message, Start):
                self._say.put(self._lie)

    def finish(self) -> None:
        self._say.put(None)

    def abandon(self) -> None:
        self._say.put(None)

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return None

    # --- an agent ---

    def _draw(self) -> bytes:
        assert self._hostile is not None
        self._left = max(self._left - 1, 0)
        self._drawn += 1
        self._hostile.attempt = self._honest.attempt
        return self._hostile.draw(self._change)

    def _change(self, header: dict[str, Any]) -> None:
        """Gives most pieces of logs a valid offset."""
        if header["type"] == "Log" and self._chance.random() < 0.9998:
            header["offset"] = self._chance.randrange(6)

    def _answers(self, message: Message) -> Iterator[Message]:
        now = time.time()
        if isinstance(message, Beat):
            yield Beat(now, self._received, message.time, now)
        elif isinstance(message, Goodbye):
            self.finish()
        elif isinstance(message, (Start, Stop)):
            self._left = BURST if self._hostile is not None and isinstance(message, Start) else 0
        for answer in self._honest.to(message, now):
            yield answer
            if isinstance(answer, Started):
                yield Log(self._honest.attempt, answer.task, 0, 5)


@dataclass
class Tally:
    """Counts so far; `bugs` are those of distlaunch, found in any thread."""

    frames: int = 0
    attempts: int = 0
    ended_links: int = 0
    bugs: list[str] = field(default_factory=list)


@dataclass
class FarTransport:
    """A transport to a fake node."""

    tally: Tally
    chance: random.Random
    hostile: bool
    spoiled: float
    lie: bytes = b""
    shares_files = False

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> ResumableLink:
        # Messages that end an attempt are rare, so that the others get a chance.
        types = [kind for kind in get_args(ToController) if kind not in ENDING] * 2000 + [*ENDING]
        frames = RandomFrames(self.chance, types, ["worker:2", "worker:3"], self.spoiled)
        agent = FarAgent(self.tally, self.chance, frames if self.hostile and not self.lie else None, self.lie)

        def watch(node: str, message: Message | LinkNews, frame: int = 0) -> None:
            if isinstance(message, LinkClosed):
                self.tally.ended_links += self.hostile
                if "a bug in distlaunch" in message.reason:
                    self.tally.bugs.append(message.reason)
            deliver(node, message, frame)

        def end(link: ResumableLink) -> int | None:
            agent.finish()
            link.join(20)
            link.abandon()
            return 0

        return ResumableLink(node, lambda: agent, watch, mirror, lease_s=lease_s, end=end)


@dataclass(frozen=True)
class LimitedPlanner(Planner):
    """A planner that plans for all nodes, lost or not, a limited number of times."""

    tally: Tally = field(default_factory=Tally)
    left: list[int] = field(default_factory=list)

    def select_nodes(self, lost: Collection[str] = ()) -> tuple[Planner, list[str]] | None:
        self.left[0] -= 1
        self.tally.attempts += 1
        return (self, []) if self.left[0] >= 0 else None


def run_once(
    folder: Path, seed: int, attempts: int, tally: Tally, spoiled: float = 0.0005, lie: bytes = b""
) -> RunReport:
    """One run of at most so many attempts; any exception is a bug. With a `lie`, the hostile node sends only that."""
    chance = random.Random(seed)
    spec = ClusterSpec.model_validate(SPEC)
    files = RunDir.create(folder)
    targets = {
        node.host: FarTransport(tally, chance, node.host == "hostile", spoiled, lie if node.host == "hostile" else b"")
        for node in spec.nodes
    }
    console = Console(NowhereSink(), [task for _, task in spec.placements()])
    planner = LimitedPlanner(spec, str(folder), os.environ, sys.executable, tally=tally, left=[attempts])
    journal, began = Journal(files.events, time.time), time.time()
    links = NodeLinks(targets, "run", files, spec.timeouts.lease_s)
    context = RunContext(
        run_id="run",
        spec=spec,
        files=files,
        links=links,
        console=console,
        journal=journal,
        started=began,
        goodput=watch_goodput(files, journal, began, spec),
        collector=Collector(spec, files, links, began, console.warn),
    )
    checks = chance.random() < 0.5
    try:
        return Supervisor(context, planner, lambda *_: Recovered.NO, Interrupts(), checks=checks).run()
    finally:
        console.close()
        journal.close()


def noting_threads(tally: Tally) -> None:
    """From now on, counts every exception that ends a thread as a bug."""
    threading.excepthook = lambda args: tally.bugs.append(f"{args.thread}: {args.exc_value!r}")
