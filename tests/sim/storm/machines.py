"""Simulated machines: agents that keep the protocol's promises, and the tasks below them.

An agent here does what `worker_entry.agent` does, as far as a controller or another machine can tell: it numbers its
frames and sends them again, keeps its lease, obeys the newest controller only, and leaves no process behind. What is
real is told to the world, which compares it with what the controller believes.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.storm.simulation import BEGAN
from tests.sim.storm.tasks import FOREVER, TaskProcess, name_members
from worker_entry.agent.connection.lease import GRACE_S
from worker_entry.protocol.gpus import ClaimGpus, GpusClaimed
from worker_entry.protocol.messages import (
    CHILD,
    Dialled,
    Empty,
    Exited,
    Inspected,
    Log,
    Message,
    Prepared,
    Ready,
    Refused,
    Signalled,
    Stacks,
)
from worker_entry.protocol.orders import VERSION, Dial, Goodbye, Hello, Inspect, Prepare, ShowStacks, Start, Stop
from worker_entry.protocol.values import DialResult, Problem, TaskExit

if TYPE_CHECKING:
    from tests.sim.storm.agents import NodeAgent
    from tests.sim.storm.links import Wire
    from tests.sim.storm.streams import NodeStream
    from tests.sim.storm.world import World

FIRST_PORT = 20500
INSTANT_S = 1e-6
"""Times that differ by less are equal."""
UNTRUSTED_S = 4.0
"""How long before a broken connection an agent may have got the last proof that its controller hears it."""


class Machine:
    """A machine; `cuts`: what its network cannot do: reach the controller (`out`), be reached (`in`), reach `peers`."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.chance = random.Random(f"{world.scenario.seed}/{name}")
        self.is_local = name == "local"
        self.is_up, self.is_frozen = True, False
        self.cuts: set[str] = set()
        self.ahead_s = self.known_ahead_s = 0.0
        self.agents: list[Agent | NodeAgent] = []
        self.streams: list[NodeStream] = []
        """The connections to them."""
        self.home = str(world.folder.parent / name)
        self.environ = {"HOME": self.home}
        if world.scenario.source == "slurm":
            self.environ |= {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": name}
        self.delays: list[float] = []
        """How much later than usual the next answers come; infinite: never."""
        self.refusals: list[str] = []
        """The reasons why the next Prepare orders are refused."""
        self._boot = 0
        self._waiting: list[Callable[[], object]] = []

    @property
    def is_running(self) -> bool:
        return self.is_up and not self.is_frozen

    @property
    def is_reachable(self) -> bool:
        """Whether a new connection can be made."""
        return self.is_running and not self.cuts & {"in", "out"}

    def time(self) -> float:
        """Unix seconds by its own clock."""
        return BEGAN + self.world.simulation.now + self.ahead_s

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        """Calls `do` after this time, unless the machine is off or restarts; not while it is frozen."""
        self.world.simulation.after(seconds, partial(self._do, self._boot, do), self.name)

    def _do(self, boot: int, do: Callable[[], object]) -> None:
        if boot != self._boot or not self.is_up:
            return
        if self.is_frozen:
            self._waiting.append(partial(self._do, boot, do))
        else:
            do()

    @property
    def processes(self) -> list[TaskProcess]:
        return [task for agent in self.agents for task in agent.running]

    def connect(self, wire: Wire) -> Agent:
        """Starts an agent."""
        agent = Agent(self, wire)
        self.agents.append(agent)
        return agent

    def find(self, folder: str) -> Agent | None:
        return next((agent for agent in self._find(folder) if isinstance(agent, Agent)), None)

    def find_node(self, folder: str) -> NodeAgent | None:
        return next((agent for agent in self._find(folder) if not isinstance(agent, Agent)), None)

    def _find(self, folder: str) -> Iterator[Agent | NodeAgent]:
        return (agent for agent in self.agents if agent.folder == folder and not agent.is_over)

    def clean(self) -> int:
        """Ends every process of the run, as another connection may order it; returns how many there were."""
        count = len(self.processes)
        for agent in [*self.agents]:
            if not agent.is_over:
                agent.end_at_once()
        return count

    # --- what happens to it ---

    def turn_off(self) -> None:
        self.is_up, self.is_frozen, self._boot = False, False, self._boot + 1
        self._waiting.clear()
        for agent in [*self.agents]:
            agent.vanish()

    def turn_on(self) -> None:
        self.is_up = True
        for stream in [*self.streams]:
            stream.vanish()

    def freeze(self) -> None:
        self.is_frozen = self.world.was_stuck = True
        self.note_change()

    def thaw(self) -> None:
        if not self.is_frozen:
            return
        self.is_frozen = False
        self.note_change()
        waiting, self._waiting = self._waiting, []
        for do in waiting:
            do()

    def cut(self, *directions: str) -> None:
        self.cuts |= {*directions}
        self.world.was_stuck = True
        self.note_change()

    def heal(self, *directions: str) -> None:
        self.cuts -= {*directions}
        self.note_change()

    def note_change(self) -> None:
        """Called when a connection of this machine may have become better or worse."""
        for agent in [*self.agents]:
            agent.note_change()
            if isinstance(agent, Agent) and agent.wire is not None:
                agent.wire.pump()
        for stream in [*self.streams]:
            stream.pump()


class Agent:
    """An agent that was started over `wire`."""

    def __init__(self, machine: Machine, wire: Wire) -> None:
        self.machine = machine
        self.world = machine.world
        self.folder = f"/run/{machine.name}-{len(machine.agents)}"
        self.wire: Wire | None = wire
        self.is_over = self._is_closing = self._is_gone = False
        self.generation = 0
        self.received = self.confirmed = self.said = 0
        self._outbox: list[Message] = []
        """The frames after the first `confirmed`."""
        self._hello: Hello | None = None
        self.attempt = 0
        self.tasks: dict[str, TaskProcess] = {}
        self.logs: dict[str, bytearray] = {}
        self._sent: dict[str, int] = {}
        self._prepared: set[str] = set()
        self._is_stopping = self._is_finished = self._is_signalled = False
        self._pending: Start | None = None
        self._killed = 0
        self._empty = 0
        """The number of the frame that reported that nothing is left."""
        self._busy_until = 0.0
        self._unproved: float | None = None
        """Since when nothing proves that the controller hears it."""

    @property
    def running(self) -> list[TaskProcess]:
        return [task for task in self.tasks.values() if task.is_alive]

    @property
    def lease_s(self) -> float:
        return self._hello.lease_s if self._hello is not None else 60.0

    @property
    def is_fenced(self) -> bool:
        """Whether everything below it will certainly end before it can act: its machine sleeps past its lease."""
        overdue = self._unproved is not None and self.world.simulation.now >= self._unproved + self.lease_s
        return not self.machine.is_up or (self.machine.is_frozen and overdue)

    # --- its connection ---

    def note_change(self) -> None:
        is_proved = self.wire is not None and self.wire.is_healthy
        if is_proved or self.is_over:
            self._unproved = None
        elif self._unproved is None:
            since = self.world.simulation.now - self.machine.chance.uniform(0, UNTRUSTED_S)
            self._unproved = since
            self.world.simulation.after(since + self.lease_s - self.world.simulation.now, self._check_lease)
        if not self.machine.is_frozen:
            self._check_lease()

    def _check_lease(self) -> None:
        if self.is_over or self._unproved is None or self.machine.is_frozen or not self.machine.is_up:
            return
        overdue_s = self.world.simulation.now - self._unproved - self.lease_s
        if overdue_s > -INSTANT_S:
            self._lose_controller(GRACE_S if overdue_s < GRACE_S else 0.0)

    def lose_connection(self) -> None:
        """The other end is closed."""
        if self.is_over:
            return
        if self.machine.is_local or self._hello is None:
            self._lose_controller(GRACE_S)
            return
        self._close_wire()

    def _close_wire(self) -> None:
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close_at_agent()
        self.note_change()

    def _lose_controller(self, grace_s: float) -> None:
        if self._is_gone:
            return
        self._is_gone = self._is_closing = True
        self.world.excuse(f"the agent of {self.machine.name} lost its controller", self.world.simulation.now)
        self._close_wire()
        self.stop(grace_s)
        self._end_if_done()

    def attach(self, wire: Wire, generation: int, received: int, offsets: Mapping[str, int], attempt: int) -> str:
        """Replaces the connection; returns why not, or nothing. `generation`: 0 if no other controller takes over."""
        if self.is_over:
            return "gone"
        if self._is_gone:
            return "busy"
        is_takeover = generation > self.generation
        if generation < self.generation:
            return "taken-over"
        received = max(received, self.confirmed) if is_takeover else received
        if not self.confirmed <= received <= self.said:
            self.world.break_rule("resend", f"{received} frames received of {self.confirmed}..{self.said}")
        if self._is_finished and received < self._empty:
            del self._outbox[self._empty - self.confirmed - 1]  # sent again after the logs before it
            self.said -= 1
            self._is_finished, self._is_stopping = False, True
        self._close_wire()
        self.wire = wire
        self.generation = generation
        wire.link.accepted(wire, self.received, received + 1)
        for message in self._outbox[received - self.confirmed :]:
            wire.to_link.send(message)
        self._sent = {name: offsets.get(name, 0) if attempt == self.attempt else 0 for name in self.tasks}
        if is_takeover and not self._is_finished:
            self._report_again()
        self.note_change()
        self.stream()
        self._finish_if_empty()
        return ""

    def confirm(self, count: int) -> None:
        """The controller has handled so many frames."""
        if count > self.confirmed:
            del self._outbox[: count - self.confirmed]
            self.confirmed = count

    def _report_again(self) -> None:
        for task in self.tasks.values():
            self.say(task.started)
            if task.ended is not None:
                self.say(task.ended)
                continue
            for message in (task.status, task.halted, task.returned):
                if message is not None:
                    self.say(message)

    def say(self, message: Message) -> None:
        if self._is_gone or self.is_over:
            return
        self.said += 1
        self._outbox.append(message)
        if self.wire is not None:
            self.wire.to_link.send(message)

    def stream(self) -> None:
        """Sends what the tasks have written."""
        if self.wire is None or self._hello is None or not self._hello.stream_logs:
            return
        for name in self.tasks:
            sent, log = self._sent.get(name, 0), self.logs[name]
            if sent < len(log):
                data = bytes(log[sent:])
                self.wire.to_link.send(Log(self.attempt, name, sent, len(data)), data)
                self._sent[name] = len(log)

    # --- orders ---

    def take(self, order: Message) -> None:
        if self.is_over:
            return
        is_delayed = self.machine.delays and not self.tasks and not isinstance(order, (Stop, Goodbye))
        delay_s = self.machine.delays.pop(0) if is_delayed else 0.0
        if delay_s:
            self.world.excuse(f"{self.machine.name} is late by {delay_s:g} s", self.world.simulation.now)
        if delay_s == FOREVER:
            return
        now, chance = self.world.simulation.now, self.machine.chance
        self._busy_until = max(now + delay_s + chance.choice([0.0, 0.01, 0.2]), self._busy_until)
        self.machine.later(self._busy_until - now, partial(self._obey, order))

    def _obey(self, order: Message) -> None:
        if self.is_over or self._is_gone:
            return
        self.world.note_order(self, order)
        match order:
            case Stop() if self._is_closing:
                self.stop(order.grace_s)
            case _ if self._is_closing:
                pass
            case Hello():
                self._hello = order
                folder = None if self.machine.is_local else self.folder
                self.say(Ready(VERSION, 7, "x", "3.11.0", "/usr/bin/python3", self.machine.time(), 4, [], None, folder))
            case Prepare():
                self._prepare(order)
            case Inspect():
                self.say(Inspected("3.15.0", [], 1 << 40, "/", "", []))
            case Dial(targets, marks=marks):
                self.say(Dialled([DialResult(target, ["10.0.0.1"]) for target in targets], marks))
            case ClaimGpus():
                self.say(GpusClaimed(order.attempt, []))
            case Start():
                self._start(order)
            case ShowStacks():
                for task in self.running:
                    self.say(Stacks(task.name, CHILD, task.activity))
            case Stop():
                self._obey_stop(order)
            case Goodbye():
                self._is_closing = True
                self.stop(GRACE_S)
                self._end_if_done()

    def _prepare(self, order: Prepare) -> None:
        if self.running:
            self.world.break_rule("order", f"Prepare while tasks of attempt {self.attempt} run on {self.machine.name}")
        self.attempt, self.tasks, self.logs, self._sent = order.attempt, {}, {}, {}
        self._is_stopping = self._is_finished = self._is_signalled = False
        self._pending = None
        self._killed = 0
        self._prepared = {request.task for request in order.tasks}
        if self.machine.refusals:
            self.world.excuse(f"{self.machine.name} refuses", self.world.simulation.now)
            self._prepared = set()
            self.say(Refused([Problem(self.machine.refusals.pop(0), "it cannot be done")]))
            return
        self.say(Prepared(order.attempt, {task: FIRST_PORT + n for n, task in enumerate(sorted(self._prepared))}))

    def _start(self, order: Start) -> None:
        names = {start.task for start in order.tasks}
        if (
            names
            and order.attempt == self.attempt
            and all(name in self.tasks and self.tasks[name].is_alive for name in names)
        ):
            return
        if order.attempt != self.attempt or names - self._prepared or self._pending is not None or self._is_stopping:
            self.world.break_rule("order", f"{self.machine.name} gets a Start of {sorted(names)} that it must refuse")
        self._pending = order
        self.machine.later(0.05, partial(self._start_now, order))

    def _start_now(self, order: Start) -> None:
        if self._pending is not order or self.is_over:
            return
        self._pending = None
        cluster = name_members(*((kind, len(addresses)) for kind, addresses in order.cluster.items()))
        for start in order.tasks:
            before = self.tasks.get(start.task)
            self.logs.setdefault(start.task, bytearray())
            task = TaskProcess(self, start.task, order.attempt, before.start + 1 if before is not None else 1)
            self.tasks[start.task] = task
            self.world.note_spawn(task)
            self.say(task.started)
            if size := start.env.get("WORLD_SIZE"):  # PyTorch
                cluster = name_members(("worker", int(size)))
            task.begin(cluster if start.task in cluster and (start.joins or size) else frozenset())

    def _obey_stop(self, order: Stop) -> None:
        if self._is_finished:
            self.say(Empty(self.attempt, 0, 0))
            self._empty = self.said
            return
        self.stop(order.grace_s, order)

    def stop(self, grace_s: float, order: Stop | None = None) -> None:
        """Begins to stop the tasks."""
        self._pending = None
        asks = not self._is_signalled
        self._is_stopping = True
        for task in self.running:
            task.note_stop()
            limit_s = max(grace_s, order.longer.get(task.name, 0.0)) if order is not None else grace_s
            task.kill_after(limit_s)
            if not task.is_alive:
                continue
            if order is not None and order.for_handlers and not task.has_handler:
                task.end(TaskExit(signal=signal.SIGKILL))
            elif asks and order is not None and order.interrupts:
                task.interrupt()
            elif asks:
                task.terminate()
        self._finish_if_empty()

    def time(self) -> float:
        return self.machine.time()

    def write(self, task: TaskProcess, line: bytes) -> None:
        self.logs[task.name] += line
        self.stream()

    def note_end(self, task: TaskProcess, ended: Exited) -> None:
        self.say(ended)
        self._killed += ended.exit.signal == signal.SIGKILL
        self.stream()
        self._finish_if_empty()
        self._end_if_done()

    def _finish_if_empty(self) -> None:
        if not self._is_stopping or self._is_finished or self.running or self._is_gone:
            return
        if self.wire is None and not self._is_closing:
            return  # the logs are not sent yet
        self.stream()
        self._is_finished, self._prepared = True, set()
        self.say(Empty(self.attempt, 0, self._killed))
        self._empty = self.said

    def _end_if_done(self) -> None:
        if self._is_closing and not self.running and not self.is_over:
            self.is_over = True
            if self.wire is not None:
                self.wire.to_link.finish()

    def end_at_once(self) -> None:
        """It is ended from outside, with everything below it."""
        self._is_gone = True
        for task in self.running:
            task.note_stop()
            task.end(TaskExit(signal=signal.SIGKILL))
        self.is_over = True
        if self.wire is not None:
            self.wire.to_link.finish()

    def vanish(self) -> None:
        """Its machine is off."""
        self.is_over = True
        for task in self.running:
            task.vanish()

    def note_signal(self) -> None:
        """All processes on the node get SIGTERM from Slurm."""
        self._is_signalled = True
        self.say(Signalled(self.machine.time()))
        for task in self.running:
            task.terminate()
