"""A run of many nodes whose agents are all played by one process: the CPU, memory and time that the controller needs.

The controller is the real one, and so are the connections: as in a large Slurm job, one program starts all agents,
which call back over TCP and prove that they know the secret. That program is this module's `play`; its agents answer
as agents do, report a step and a sample every 2 s, and 1 kB of log every second. Then one task fails.
`python -m tests.benchmarks.simulated_nodes N…` measures other numbers of nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.controller import assembly, launch
from launcher.rundir.directory import RunDir
from launcher.spec.models import ClusterSpec
from launcher.transports.base import Transport
from launcher.transports.connector import Opening
from launcher.transports.gathering import Gathering
from launcher.transports.payload import Payload, make_payload
from launcher.transports.remote import RemoteTransport
from launcher.transports.streams import Stream
from launcher.transports.targets import Targets
from worker_entry.bootstrap import callback
from worker_entry.bootstrap.install import HERE
from worker_entry.protocol import orders
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import (
    Dialled,
    Empty,
    Exited,
    Inspected,
    Listening,
    Log,
    Message,
    Prepared,
    Ready,
    Sampled,
    Started,
    Status,
)
from worker_entry.protocol.resend_buffer import is_counted
from worker_entry.protocol.samples import NodeSample, TaskSample
from worker_entry.protocol.values import DialResult, Progress, TaskExit, TaskStatus
from worker_entry.system import clock

NODES = (125, 250, 500, 1000)
STEADY_S = float(os.environ.get("SIMULATED_S", "20"))
"""How long the tasks train; a minute would cost three times as much."""
REPORT_S, LOG_S = 2.0, 1.0
LINE = b"x" * 99 + b"\n"
PIECE = LINE * 10
MARKS = "SIMULATED_MARKS"


# --- the controller ---


@dataclass(frozen=True)
class _Way:
    """The way to a node whose agent `play` simulates."""

    host: str
    gathering: Gathering
    address: str | None = None

    def open(self, payload: Payload, python: str, opening: Opening) -> Stream:
        assert payload.verb == "node"
        assert self.gathering.wants(self.host)
        return self.gathering.take(self.host, python, opening)


def _make_transports(spec: ClusterSpec, _targets: Targets, _files: RunDir, _run_id: str) -> dict[str, Transport]:
    words = [sys.executable, "-m", "tests.benchmarks.simulated_nodes", "play", str(len(spec.nodes))]
    hosts = [node.host for node in spec.nodes]
    gathering = Gathering(words, {**os.environ}, hosts, lambda _: True)
    return {host: RemoteTransport(_Way(host, gathering), sys.executable) for host in hosts}


def control(count: int, folder: Path) -> None:
    """Runs the cluster with the played agents."""
    setattr(assembly, "make_transports", _make_transports)  # noqa: B010 - `assembly` imported it by name
    nodes = [
        {"host": f"node{number}", "address": f"10.{number >> 8}.{number & 255}.1", "connection": {"command": ["true"]}}
        for number in range(count)
    ]
    program = {"command": ["./train"]}
    spec = ClusterSpec.model_validate({"name": "many", "nodes": nodes, "program": program})
    launch.run(spec, run_dir=folder / "run", verbose=False, checks=True)


# --- the agents ---


class _Agent:
    """One agent at the other end of a connection, and its task."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.connection = connection
        self.node = f"node{number}"
        self.task = f"worker:{number}"
        self.is_up = self.is_stopped = self.is_over = False
        self._decoder = Decoder(orders.ToAgent)
        self._outgoing = bytearray(MARKER)
        self._received = 0
        self._offset = self._step = 0

    def read(self) -> None:
        data = self.connection.recv(1 << 18)
        if not data:
            self.is_over = True
            return
        for message, _ in self._decoder.feed(data):
            if is_counted(message):
                self._received += 1
            self._answer(message)

    def send(self, message: Message, body: bytes = b"") -> None:
        self._outgoing += encode(message, body)

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._outgoing and not self.is_over:
                del self._outgoing[: self.connection.send(self._outgoing)]

    def report(self) -> None:
        now = clock.now()
        self._step += 10
        progress = Progress(
            step=self._step, first_step=1, batches=self._step, began=now, time=now, own_s=0.1, step_s=0.2
        )
        self.send(Status(self.task, TaskStatus("is training", now, progress)))
        use = NodeSample(cpu_s=now % 1e6, cores=8, memory=1 << 30, memory_total=1 << 34)
        self.send(Sampled(now, [TaskSample(self.task, now % 1e6, 1 << 30, 0.0)], use))

    def log(self) -> None:
        self.send(Log(1, self.task, self._offset, len(PIECE), []), PIECE)
        self._offset += len(PIECE)

    def die(self) -> None:
        self.send(Exited(self.task, TaskExit(code=1), clock.now()))

    def _answer(self, message: Message) -> None:
        now = clock.now()
        match message:
            case orders.Beat(time=sent):
                self.send(orders.Beat(now, self._received, echo=sent, stamp=now))
            case orders.Hello():
                self.send(Ready(orders.VERSION, 1000, self.node, "3.11.7", "/usr/bin/python3", now, 8, [], "2.21.0"))
            case orders.Prepare(attempt=attempt):
                self.send(Prepared(attempt, {self.task: 20000}))
            case orders.Inspect():
                self.send(Inspected(None, [], 1 << 40, "/work", "", [], addresses=[f"10.0.0.{len(self.node)}"]))
            case orders.Dial(targets=targets, marks=marks):
                self.send(Dialled([DialResult(target, [target.host]) for target in targets], marks))
            case orders.Start():
                self.is_up = True
                self.send(Started(self.task, 1001, now))
                self.send(Listening(self.task, now))
            case orders.Stop():
                self.is_stopped = True
                self.send(Exited(self.task, TaskExit(signal=15), now))
                self.send(Empty(1, 0, 0))
            case orders.Goodbye():
                self.is_over = True


def play(count: int) -> None:
    """Plays the agents of so many nodes; writes the CPU time of the controller, its parent, at each phase."""
    reader = sys.stdin.buffer
    reader.readline()
    reader.read(len(make_payload("node", "callback").bootstrap))
    order = json.loads(reader.readline())
    clock.share()
    began = time.monotonic()
    with open(os.environ[MARKS], "w", encoding="utf-8", buffering=1) as marks:

        def mark(phase: str) -> None:
            used = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            cpu_s = (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")
            print(json.dumps({"phase": phase, "time": time.monotonic() - began, "cpu_s": cpu_s}), file=marks)

        mark("begin")
        selector = selectors.EpollSelector()
        agents = []
        for number in range(count):
            agents.append(_Agent(number, _call(order, f"node{number}")))
            selector.register(agents[-1].connection, selectors.EVENT_READ, agents[-1])
            agents[-1].flush()
        mark("called")
        _play(agents, selector, mark)


def _call(order: dict[str, Any], node: str) -> socket.socket:
    os.environ["SLURMD_NODENAME"] = node
    connection = callback._call(["127.0.0.1"], order["port"], order["secret"], 60.0)
    left = callback.receive_line(connection)["bootstrap"]
    while left:
        left -= len(connection.recv(left))
    connection.sendall(HERE)
    connection.setblocking(False)
    return connection


def _play(agents: list[_Agent], selector: selectors.BaseSelector, mark: Any) -> None:
    phases = _phases(agents, mark)
    next(phases)
    while any(not agent.is_over for agent in agents):
        for key, _ in selector.select(0.05):
            key.data.read()
            key.data.flush()
            if key.data.is_over:
                selector.unregister(key.fd)
                key.data.connection.close()
        next(phases, None)
    mark("over")


def _phases(agents: list[_Agent], mark: Any) -> Iterator[None]:
    """Waits for each phase, and reports while the tasks train; yields once a turn of the loop."""
    while not all(agent.is_up for agent in agents):
        yield
    mark("started")
    began = time.monotonic()
    reports = logs = 0
    while (passed := time.monotonic() - began) < STEADY_S:
        # Reports are spread over time, like those of real nodes.
        for wanted, done, period_s, act in (
            (passed, reports, REPORT_S, _Agent.report),
            (passed, logs, LOG_S, _Agent.log),
        ):
            until = int(wanted / period_s * len(agents))
            for number in range(done, until):
                act(agents[number % len(agents)])
                agents[number % len(agents)].flush()
            if act is _Agent.report:
                reports = until
            else:
                logs = until
        yield
    mark("trained")
    agents[len(agents) // 2].die()
    agents[len(agents) // 2].flush()
    while not all(agent.is_stopped for agent in agents):
        yield
    mark("stopped")


# --- the measurement ---


def measure(_runs: int) -> None:
    print(f"agents played by one process; tasks train for {STEADY_S:g} s")
    print("  nodes  start:      CPU    training   one dies:    CPU     the end   all CPU     memory  plan.json")
    for count in NODES:
        print(_measure(count), flush=True)


def _measure(count: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, MARKS: f"{folder}/marks"}
        words = [sys.executable, "-m", "tests.benchmarks.simulated_nodes", "control", str(count), folder]
        with open(f"{folder}/said", "wb") as said:
            process = subprocess.Popen(words, env=environ, stdout=said, stderr=said)
            _, _, used = os.wait4(process.pid, 0)
        marks = [json.loads(line) for line in Path(folder, "marks").read_text().splitlines()]
        at = {mark["phase"]: mark for mark in marks}
        report = json.loads(Path(folder, "run", "report.json").read_text())
        assert report["verdict"]["reference"] == "task-failed", Path(folder, "said").read_text()[-2000:]
        logs = sum(path.stat().st_size for path in Path(folder, "run", "attempt-1").glob("*.log"))
        assert logs >= count * len(PIECE) * (STEADY_S / LOG_S - 2), logs
        plan = Path(folder, "run", "plan.json").stat().st_size

    def between(first: str, last: str, what: str) -> float:
        return float(at[last][what] - at[first][what])

    share = between("started", "trained", "cpu_s") / between("started", "trained", "time")
    columns = [
        f"{count:>7,}",
        *(f"{between('begin', 'started', what):7.1f} s" for what in ("time", "cpu_s")),
        f"{100 * share:9.0f} %",
        *(f"{between('trained', 'stopped', what):7.1f} s" for what in ("time", "cpu_s")),
        f"{between('stopped', 'over', 'time'):7.1f} s",
        f"{used.ru_utime + used.ru_stime:7.1f} s",
        f"{used.ru_maxrss / 1024:7.0f} MiB",
        f"{plan / 1e6:6.2f} MB",
    ]
    return " ".join(columns)


def main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    verb, *rest = sys.argv[1:]
    if verb == "play":
        play(int(rest[0]))
    elif verb == "control":
        control(int(rest[0]), Path(rest[1]))
    else:
        for count in map(int, sys.argv[1:]):
            print(_measure(count), flush=True)


if __name__ == "__main__":
    main()
