"""Nodes that follow a script, behind a fake transport: whole runs in one thread, in fake time.

A node answers every order as an agent does, a moment later, and its tasks end by themselves after `LIFE_S`. A script
states the deviations: in which phase, of which attempt, on which node.
"""

from __future__ import annotations

import signal
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from launcher.console.terminal import NowhereSink
from launcher.console.writer import Console
from launcher.controller.attempt import AttemptLoop
from launcher.controller.bundle import make_bundle
from launcher.controller.collect.collector import Collector
from launcher.controller.context import AttemptSetup, RunContext
from launcher.controller.goodput import watch_goodput
from launcher.controller.links import NodeLinks
from launcher.controller.nodes import Recovered
from launcher.controller.supervisor import Supervisor
from launcher.gang.checks.preflight import Preflight
from launcher.gang.events import Interrupted, StacksAsked
from launcher.gang.faults import parse_fault
from launcher.gang.state import AttemptState, Phase
from launcher.plan.making import SERVER_MODULE
from launcher.plan.planner import Planner, fill_in_folders
from launcher.report.goodput import KINDS
from launcher.report.models import RunReport
from launcher.rundir.directory import RunDir
from launcher.rundir.history import NO_HISTORY
from launcher.rundir.journal import Journal
from launcher.signals import STACKS_SIGNAL, Interrupts
from launcher.spec.models import ClusterSpec
from launcher.tasks import LOCAL
from launcher.transports.base import (
    AgentAddress,
    Deliver,
    FileSink,
    LinkClosed,
    LinkDropped,
    LinkNews,
    LinkResumed,
    Resumption,
)
from tests.sim.clock import FakeTiming
from worker_entry.protocol.collection import FileRead, FilesFound, FindFiles, FoundFile, ReadFile
from worker_entry.protocol.framing import Decoder, encode
from worker_entry.protocol.gpus import BusyGpu, ClaimGpus, GpuHolder, GpusClaimed, ReleaseGpus
from worker_entry.protocol.messages import (
    CHILD,
    Dialled,
    Empty,
    Exited,
    Fetch,
    Inspected,
    InterruptTaken,
    Listening,
    Log,
    Message,
    Prepared,
    Ready,
    Refused,
    Stacks,
    Started,
    Status,
    Synced,
    ToController,
)
from worker_entry.protocol.orders import (
    VERSION,
    Dial,
    Hello,
    Inspect,
    Offer,
    Piece,
    Prepare,
    ShowStacks,
    Start,
    Stop,
    ToAgent,
)
from worker_entry.protocol.resend_buffer import is_counted
from worker_entry.protocol.speed import LinkMeasured, MeasureLink, MeasureNode, NodeMeasured
from worker_entry.protocol.values import (
    Activity,
    CrashRecord,
    DialResult,
    Problem,
    Progress,
    Target,
    TaskExit,
    TaskStatus,
)

T = TypeVar("T")

FIRST_PORT = 20500
"""The first of the ports that a node holds; the plan expects other ports."""
ANSWER_S = 0.01
"""How long a node takes to answer."""
UP_S = 10.0
"""How long after its start a cluster is up for certain: the time of a script's deeds in phase RUNNING."""
LIFE_S = 100.0
"""How long a task runs if no script ends it."""
SILENCE_S = 10.0
"""Silence after which a link counts as broken."""

INT = TaskExit(signal=signal.SIGINT)
TERM = TaskExit(signal=signal.SIGTERM)
KILL = TaskExit(signal=signal.SIGKILL)


class Answers:
    """The answers of an agent whose tasks start at once, and end when they are told to."""

    def __init__(self) -> None:
        self.attempt = 0
        self.tasks: list[str] = []
        """The prepared tasks."""
        self.running: list[str] = []
        self.starts: dict[str, int] = {}
        """How often each task was started."""

    def to(self, order: Message, now: float) -> Iterator[Message]:
        """`now`: Unix seconds by the node's clock."""
        match order:
            case Hello():
                yield Ready(VERSION, 7, "far", "3.11.0", "/usr/bin/python3", now, 4, [], "2.21.0", "/run/agent")
            case Prepare(attempt, requests):
                self.attempt, self.tasks = attempt, [request.task for request in requests]
                self.running, self.starts = [], {}
                yield Prepared(attempt, {task: FIRST_PORT + number for number, task in enumerate(self.tasks)})
            case Inspect():
                yield Inspected("3.15.0", [], 1 << 40, "/", "", [])
            case Dial(targets, marks=marks):
                yield Dialled([DialResult(target, ["10.0.0.1"]) for target in targets], marks)
            case MeasureNode():
                yield NodeMeasured("TensorFlow on CPU", 100.0, 10.0)
            case MeasureLink():
                yield LinkMeasured(100.0, 10.0, 0.0001)
            case Start(_, tasks):
                started = [start.task for start in tasks]
                self.running += started
                for task in started:
                    self.starts[task] = self.starts.get(task, 0) + 1
                    yield Started(task, 8, now, self.starts[task])
                    yield Listening(task, now)
            case Stop():
                yield from self.stop(INT if order.interrupts else TERM, now)

    def stop(self, how: TaskExit, now: float) -> Iterator[Message]:
        """Ends all tasks in this way; no process is left."""
        for task in self.running:
            yield Exited(task, how, now, start=self.starts[task])
        self.running = []
        yield Empty(self.attempt, 0, 0)


# --- scripts ---


Deed = Callable[["FakeAgent"], bool]
"""Makes something happen on a node; returns whether the node then answers the phase's first order as usual."""


@dataclass(frozen=True)
class At:
    """A deed on a node as soon as the node is in this phase of the attempt.

    In CONNECTING, CLAIMING and SYNCING, `attempt` counts the connections to the node.
    """

    phase: Phase
    do: Deed
    node: str = "gpu-b"
    attempt: int = 1


@dataclass(frozen=True)
class Exit:
    """How a task ends by itself, `after_s` after its start; `start` counts its starts within the attempt."""

    task: str
    how: TaskExit
    after_s: float = 20.0
    attempt: int = 1
    start: int = 1
    crash: str = ""
    """Such as `ValueError: no batch`."""
    log: str = ""
    """The task's last output."""
    evidence: Problem | None = None
    finished: bool = False


@dataclass(frozen=True)
class Steps:
    """A task's report that it has done these steps; `first` is None if it has begun to train but done no step."""

    task: str
    first: int | None
    last: int
    after_s: float = 5.0
    attempt: int = 1
    injected: tuple[str, ...] = ()
    saves: bool = False
    """Whether its program has a PreemptionCheckpointHandler."""
    p99_s: float | None = None


@dataclass(frozen=True)
class Shows:
    """What a task shows when it is asked, from `after_s` after its start on: its stack, and how active it is."""

    task: str
    activity: Activity = Activity()  # noqa: RUF009 - it is frozen
    stack: str = CHILD
    after_s: float = 0.0
    attempt: int = 1


Script = Sequence[At | Exit | Steps | Shows]


def lose(reason: str = "the connection broke", left: int | None = None) -> Deed:
    """The node is lost; `left`: how many of its processes are left once its link is closed, None if unknown."""

    def do(agent: FakeAgent) -> bool:
        agent.lose(reason, left)
        return False

    return do


def empty_and_lost(agent: FakeAgent) -> bool:
    """The node's tasks end, and then its connection."""
    agent.world.timing.after(2 * ANSWER_S, lambda: agent.lose("the connection broke", left=0))
    return True


def be_taken_over(agent: FakeAgent) -> bool:
    """Another controller has the agent now."""
    agent.tell(LinkClosed("taken over", taken_over=True))
    return False


def refuse(reference: str, message: str = "it cannot be done", task: str | None = None) -> Deed:
    return say(Refused([Problem(reference, message, task=task)]), instead=True)


def say(*messages: Message, instead: bool = False) -> Deed:
    def do(agent: FakeAgent) -> bool:
        agent.answer(*messages)
        return not instead

    return do


def fall_silent(agent: FakeAgent) -> bool:
    """The node hangs, and sends nothing more."""
    agent.fall_silent()
    return False


def say_nothing(agent: FakeAgent) -> bool:
    """The node answers beats but not this order."""
    return False


def answer_late(seconds: float) -> Deed:
    """The node answers this order as usual, but only so many seconds later."""

    def do(agent: FakeAgent) -> bool:
        order = agent.order
        agent.later(seconds, lambda: agent.answer(*agent._answers.to(order, agent.now())))
        return False

    return do


def drop(back_s: float | None) -> Deed:
    """The connection breaks, and comes back `back_s` later, or never if None."""

    def do(agent: FakeAgent) -> bool:
        agent.tell(LinkDropped("the connection broke"))
        if back_s is not None:
            agent.world.timing.after(back_s, lambda: agent.tell(LinkResumed(back_s)))
        return True

    return do


def user(*signums: int) -> Deed:
    """The user sends the controller these signals."""

    def do(agent: FakeAgent) -> bool:
        for signum in signums:
            signal.raise_signal(signum)
        return True

    return do


def take_interrupt(agent: FakeAgent) -> bool:
    """The programs of the node raise KeyboardInterrupt, and save for longer than the grace."""
    agent.answer(*(InterruptTaken(task) for task in agent._answers.running))
    return ignore_term(agent)


def ignore_term(agent: FakeAgent) -> bool:
    """The tasks of the node end with the KILL that follows the grace."""
    assert isinstance(agent.order, Stop)
    agent.later(agent.order.grace_s, lambda: agent.stop(KILL))
    return False


def both(*deeds: Deed) -> Deed:
    def do(agent: FakeAgent) -> bool:
        answers = [deed(agent) for deed in deeds]
        return all(answers)

    return do


# --- the nodes ---


_PHASES: Mapping[type, Phase] = {
    Hello: Phase.CONNECTING,
    ClaimGpus: Phase.CLAIMING,
    Offer: Phase.SYNCING,
    Prepare: Phase.PREPARING,
    Dial: Phase.CHECKING,
    Start: Phase.FORMING,
    Stop: Phase.STOPPING,
}
"""Phases by the order with which a node enters them."""


class FakeAgent:
    """One connection to a node, and the agent behind it, from Hello on."""

    def __init__(self, world: FakeNodes, node: str, number: int, deliver: Deliver, mirror: FileSink) -> None:
        self.world = world
        self.node = node
        self.order: Message = Hello(VERSION, "", "", "", 0, stream_logs=True)
        """The last order."""
        self.alive = True
        self.silent_since: float | None = None
        self.left: int | None = 0
        self.clock_offset_s = world.clock_offsets.get(node, 0.0)
        self._number = number
        self._deliver = deliver
        self._mirror = mirror
        self._answers = Answers()
        self._starts: dict[str, int] = {}
        self._started: dict[str, float] = {}
        """When each task was last started, by the run's clock."""
        self._stopping = False
        self._said = self._confirmed = 0
        self._decoder = Decoder(ToAgent)

    # --- as a link ---

    kept = None

    @property
    def last_heard(self) -> float:
        return self.world.timing.monotonic() if self.silent_since is None else self.silent_since

    def send(self, message: Message, body: bytes = b"") -> None:
        for order, data in self._decoder.feed(encode(message, body)):
            if self.alive:
                self.world.orders.append((self.node, order))
                if self.silent_since is None:
                    self._take(order, data)

    def confirm(self, frame: int) -> None:
        assert self._confirmed <= frame <= self._said
        self._confirmed = frame

    def drop_if_silent(self, limit_s: float) -> None:
        silent_s = self.world.timing.monotonic() - self.last_heard
        if silent_s > limit_s:
            self.lose(f"its agent did not answer for {silent_s:.0f} s")

    def abandon(self) -> None:
        self.alive = False

    def close(self) -> int | None:
        self.alive = False
        return self.left

    # --- what a script does ---

    def lose(self, reason: str, left: int | None = None) -> None:
        if self.alive:
            self.silent_since = self.last_heard
            self.alive, self.left = False, left
            self._deliver(self.node, LinkClosed(reason))

    def fall_silent(self) -> None:
        timing, lease_s = self.world.timing, self.world.lease_s
        self.silent_since = timing.monotonic()
        timing.after(SILENCE_S, lambda: self.tell(LinkDropped("nothing came")))
        timing.after(lease_s, lambda: self.lose(f"nothing came, and not reconnected within {lease_s:g} s"))

    def tell(self, news: LinkNews) -> None:
        """Delivers news from the link itself."""
        if self.alive:
            self._deliver(self.node, news)

    def answer(self, *messages: Message) -> None:
        """Delivers messages from the agent, a moment later."""

        def deliver() -> None:
            for message in messages:
                for heard, _ in Decoder(ToController).feed(encode(message)):
                    self._say(heard)

        self.later(ANSWER_S, deliver)

    def _say(self, message: Message) -> None:
        self._said += is_counted(message)
        self._deliver(self.node, message, self._said)

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Calls `do` after so many seconds, unless the node is gone or hangs by then."""

        def if_alive() -> None:
            if self.alive and self.silent_since is None:
                do()

        self.world.timing.after(seconds, if_alive)

    def stop(self, how: TaskExit) -> None:
        self._stopping = True
        self.answer(*self._answers.stop(how, self.now()))

    def now(self) -> float:
        """Unix seconds by the node's clock."""
        return self.world.timing.now() + self.clock_offset_s

    # --- as an agent ---

    def _take(self, order: Message, data: bytes) -> None:
        self.order = order
        if isinstance(order, Prepare):
            self._stopping, self._starts = False, {}
        phase = _PHASES.get(type(order))
        if isinstance(order, Start):
            self._start(order)
        elif phase is None or self._enter(phase):
            match order:
                case Offer(files=[]):
                    self.answer(Synced("/synced", 0, 0, order.checkpoint))
                case Offer(files=[first, *_]):
                    self.answer(Fetch(0, 0, first.size, first.size, order.checkpoint))
                case Piece():
                    self.world.fetched.append(data)
                    self.answer(Synced("/synced", 1, len(data), order.checkpoint))
                case Hello():
                    [ready] = self._answers.to(order, self.now())
                    assert isinstance(ready, Ready)
                    self.answer(replace(ready, gpus=[*self.world.gpus.get(self.node, ())]))
                case ClaimGpus():
                    self.later(ANSWER_S, lambda: self._say(self._claim(order)))
                case ReleaseGpus():
                    self.world.kept.pop(self.node, None)
                case FindFiles():
                    self.answer(self._find(order))
                case ReadFile():
                    self.later(ANSWER_S, partial(self._read, order))
                case Stop():
                    self.stop(INT if order.interrupts else TERM)
                case Dial(targets, marks=marks):
                    refused = self.world.refused.get(self.node, ())
                    self.answer(Dialled([_dial(target, refused) for target in targets], marks))
                case ShowStacks():
                    self.answer(*map(self._show, self._answers.running))
                case _:
                    self.answer(*self._answers.to(order, self.now()))

    def _claim(self, order: ClaimGpus) -> GpusClaimed:
        users = self.world.gpus[self.node]
        free = [gpu for gpu in order.gpus if not users[gpu]][: order.count]
        if len(free) == order.count:
            self.world.kept[self.node] = free
            return GpusClaimed(order.attempt, free)
        self.world.kept.pop(self.node, None)
        busy = [BusyGpu(gpu, [GpuHolder(77, users[gpu], "python")]) for gpu in order.gpus if users[gpu]]
        return GpusClaimed(order.attempt, [], busy)

    def _find(self, order: FindFiles) -> FilesFound:
        files = self.world.files.get(self.node, {})
        found = [
            FoundFile(path, len(data), changed, 1)
            for (directory, path), (changed, data) in sorted(files.items())
            if directory == order.directory
        ]
        return FilesFound(order.number, order.directory or "/work", found)

    def _read(self, order: ReadFile) -> None:
        changed, data = self.world.files[self.node].get((order.directory, order.path), (0, b""))
        part = data[order.offset : order.offset + order.size]
        answer = FileRead(order.number, order.path, order.offset, len(part), len(data), changed)
        self._mirror.store(answer, part)
        self._say(answer)

    def _start(self, order: Start) -> None:
        for task in order.tasks:
            self._starts[task.task] = self._starts.get(task.task, 0) + 1
            self._started[task.task] = self.world.timing.monotonic()
            self._live(task.task, serves=task.program.target == SERVER_MODULE)
        answers = [*self._answers.to(order, self.now())]
        self.answer(*answers[::2])
        if max(self._starts.values()) > 1:  # a task that is restarted alone
            self.answer(*answers[1::2])
            return
        if self._enter(Phase.FORMING):
            self.answer(*answers[1::2])
        self.later(UP_S, lambda: None if self._stopping else self._run_on())

    def _show(self, task: str) -> Stacks:
        lived_s = self.world.timing.monotonic() - self._started[task]
        shown = Shows(task)
        for step in self.world.script:
            if isinstance(step, Shows) and (step.task, step.attempt) == (task, self._answers.attempt):
                shown = step if step.after_s <= lived_s else shown
        return Stacks(task, shown.stack, shown.activity)

    def _run_on(self) -> None:
        self._enter(Phase.RUNNING)

    def _enter(self, phase: Phase) -> bool:
        """Does the script's deeds for the phase; returns whether the node then answers as usual."""
        attempt = self._number if phase in (Phase.CONNECTING, Phase.CLAIMING, Phase.SYNCING) else self._answers.attempt
        if isinstance(self.order, Prepare) and phase is Phase.PREPARING:
            attempt = self.order.attempt
        steps = (step for step in self.world.script if isinstance(step, At))
        return both(*(s.do for s in steps if (s.phase, s.node, s.attempt) == (phase, self.node, attempt)))(self)

    def _live(self, task: str, *, serves: bool) -> None:
        attempt, start = self._answers.attempt, self._starts[task]
        ends = [Exit(task, TaskExit(0), LIFE_S)] if not serves else []
        for step in self.world.script:
            if isinstance(step, Steps) and (step.task, step.attempt) == (task, attempt):
                self._when_running(step.after_s, step.task, start, partial(self._tell_steps, step))
            if isinstance(step, Exit) and (step.task, step.attempt, step.start) == (task, attempt, start):
                ends = [step]
        for end in ends:
            self._when_running(end.after_s, task, start, partial(self.end, end))

    def _when_running(self, seconds: float, task: str, start: int, do: Callable[[], None]) -> None:
        attempt = self._answers.attempt

        def if_running() -> None:
            if self._answers.attempt == attempt and task in self._answers.running and self._starts[task] == start:
                do()

        self.later(seconds, if_running)

    def end(self, end: Exit) -> None:
        self._answers.running.remove(end.task)
        if end.log:
            data = end.log.encode()
            self._mirror.write(Log(self._answers.attempt, end.task, 0, len(data)), data)
        now, (exception, _, message) = self.now(), end.crash.partition(": ")
        crash = CrashRecord(now, exception, message, "train.py", 9) if end.crash else None
        finished = now if end.finished else None
        self._say(Exited(end.task, end.how, now, crash, finished, end.evidence, self._starts[end.task]))

    def _tell_steps(self, steps: Steps) -> None:
        now = self.now()
        done = 0 if steps.first is None else steps.last - steps.first + 1
        progress = Progress(steps.last, steps.first, done, now, now, p99_s=steps.p99_s)
        self._say(
            Status(steps.task, TaskStatus("trains", now, progress, [*steps.injected], saves_when_preempted=steps.saves))
        )


def _dial(target: Target, refused: Collection[str]) -> DialResult:
    return DialResult(target, ["10.0.0.1"], "refused" if {target.task, target.host} & {*refused} else "")


@dataclass
class FakeNodes:
    """All nodes of a run, connected or not, and their shared state."""

    timing: FakeTiming
    script: Script = ()
    lease_s: float = 60.0
    clock_offsets: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The tasks or addresses that refuse a node's connections, by the node that dials."""
    orders: list[tuple[str, Message]] = field(default_factory=list)
    """All orders sent, with their nodes."""
    fetched: list[bytes] = field(default_factory=list)
    files: dict[str, dict[tuple[str, str], tuple[int, bytes]]] = field(default_factory=dict)
    """The files of each node, by directory and path: when they were changed, and their content."""
    gpus: dict[str, dict[str, str]] = field(default_factory=dict)
    """The GPUs of each node, each with the user who uses it; empty if nobody does."""
    kept: dict[str, list[str]] = field(default_factory=dict)
    """The GPUs that each node keeps for the run."""
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    """The last agent of each node."""
    connections: dict[str, int] = field(default_factory=dict)

    def orders_of(self, node: str) -> list[Message]:
        return [order for to, order in self.orders if to == node]

    def kinds_of(self, node: str) -> list[str]:
        return [type(order).__name__ for order in self.orders_of(node)]


@dataclass
class FakeTransport:
    """A transport to one of the fake nodes."""

    world: FakeNodes
    shares_files: bool = False
    error: OSError | None = None

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> FakeAgent:
        if self.error is not None:
            raise self.error
        assert lease_s == self.world.lease_s
        number = self.world.connections[node] = self.world.connections.get(node, 0) + 1
        agent = self.world.agents[node] = FakeAgent(self.world, node, number, deliver, mirror)
        return agent


# --- a run ---


class RecordingSink(NowhereSink):
    """A sink that keeps the notes and the output; once `broken`, writing a note fails."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.output = b""
        self.broken = False

    def write(self, text: bytes) -> None:
        self.output += text

    def note(self, text: str) -> None:
        if self.broken:
            raise BrokenPipeError
        self.notes.append(text)


NODES = [{"host": "gpu-a"}, {"host": "gpu-b"}]


class FakeRun:
    """A run on fake nodes; the rest of the run is real.

    Args:
        folder: an empty one.
        script: what the nodes do.
        spec: fields in addition to those that every spec here has.
        faults: what is injected, as `--chaos` takes it.
        checks: whether the nodes are checked.
        only_checks: whether the run ends after the checks.
        recover: how many requests it takes until lost nodes are back; None: they never come back.
        recovered: what is then known of them.
        errors: the nodes that cannot be connected, with the errors.
        listed: the nodes of each later listing.
        world: other arguments of FakeNodes.
    """

    def __init__(
        self,
        folder: Path,
        script: Script = (),
        spec: Mapping[str, Any] | None = None,
        *,
        faults: Sequence[str] = (),
        checks: bool = False,
        only_checks: bool = False,
        recover: int | None = None,
        recovered: Recovered = Recovered.YES,
        errors: Mapping[str, OSError] | None = None,
        listed: Sequence[Sequence[Mapping[str, Any]]] = (),
        **world: Any,
    ) -> None:
        self.timing = FakeTiming()
        self.files = RunDir.create(folder)
        fields = {"nodes": NODES, "program": {"script": "train.py"}, "preload": False, **(spec or {})}
        self.spec = fill_in_folders(ClusterSpec.model_validate(fields), self.files)
        self.nodes = FakeNodes(self.timing, script, self.spec.timeouts.lease_s, **world)
        self.asked: list[tuple[str, str]] = []
        """The nodes that the run tried to recover, with the reattach folders of their agents."""
        self._recover_after = recover
        self._recovered = recovered
        self._listed = [*listed]
        transports = {
            node.host: FakeTransport(self.nodes, node.host == LOCAL, (errors or {}).get(node.host))
            for node in self.spec.nodes
        }
        self.sink = RecordingSink()
        self.console = Console(self.sink)
        self.planner = Planner(self.spec, str(folder), {}, sys.executable)
        journal = Journal(self.files.events, self.timing.now)
        weakref.finalize(self, journal.close)
        links = NodeLinks(transports, "run", self.files, self.spec.timeouts.lease_s, self.timing)
        self.context = RunContext(
            run_id="run",
            spec=self.spec,
            files=self.files,
            links=links,
            console=self.console,
            journal=journal,
            started=self.timing.now(),
            goodput=watch_goodput(self.files, journal, self.timing.now(), self.spec),
            collector=Collector(self.spec, self.files, links, self.timing.now(), self.console.warn),
            bundle=make_bundle(self.spec.sync, folder.parent) if self.spec.sync is not None else None,
            only_checks=only_checks,
        )
        self.history = NO_HISTORY
        """The history of earlier controllers."""
        self._checks = checks
        self._faults = [parse_fault(fault, self.spec) for fault in faults]
        self._interrupts = Interrupts()

    def run(self) -> RunReport:
        """Runs all attempts; asserts that goodput counts each second once."""
        report = self._within_signals(self.supervisor().run)
        goodput = report.goodput
        assert goodput is not None
        assert abs(sum(getattr(goodput, kind) for kind in KINDS) - (report.ended - report.started)) < 1e-6
        return report

    def check(self) -> tuple[AttemptState, Preflight]:
        return self._within_signals(self.supervisor().check)

    def attempt(self) -> AttemptState:
        """Runs one attempt, and closes its links."""
        chosen = self.planner.select_nodes()
        assert chosen is not None
        preflight = Preflight(chosen[0].spec, "nonce", chosen[0].candidates) if self._checks else None
        links = self.context.links
        self._interrupts.deliver_to(
            lambda signum, _is_request: links.put(StacksAsked() if signum == STACKS_SIGNAL else Interrupted(signum))
        )
        loop = AttemptLoop(self.context, AttemptSetup(planner=chosen[0], preflight=preflight), 1, self._faults)

        def run() -> AttemptState:
            try:
                return loop.run()[0]
            finally:
                links.close()

        return self._within_signals(run)

    def supervisor(self) -> Supervisor:
        return Supervisor(
            self.context,
            self.planner,
            self._recover,
            self._interrupts,
            relist=self._relist,
            checks=self._checks,
            faults=self._faults,
            history=self.history,
        )

    @property
    def said(self) -> str:
        """The notes shown to the user, one per line, once the run is over."""
        return "\n".join(self.sink.notes)

    @property
    def output(self) -> str:
        """The tasks' output, as shown."""
        return self.sink.output.decode()

    def _within_signals(self, do: Callable[[], T]) -> T:
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started with SIGHUP ignored
        self._interrupts.install()
        try:
            return do()
        finally:
            self._interrupts.restore()
            signal.signal(signal.SIGHUP, before)
            assert not self.timing.repeating, "a function is still called after the run"
            self.console.close()

    def _recover(self, node: str, agent: AgentAddress) -> Recovered:
        self.asked.append((node, agent.reattach_folder))
        is_back = self._recover_after is not None and len(self.asked) >= self._recover_after
        return self._recovered if is_back else Recovered.NO

    def _relist(self, planner: Planner, is_wanted: Callable[[], bool]) -> Planner:
        """The next of the `listed` nodes, as long as some are left."""
        assert is_wanted()
        if not self._listed:
            return planner
        spec = planner.spec.with_nodes(self._listed.pop(0))
        self.context.links.add({node.host: FakeTransport(self.nodes, node.host == LOCAL, None) for node in spec.nodes})
        return replace(planner, spec=spec)
