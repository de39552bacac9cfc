"""Simulated connections between a controller and the agents, with the contract of `launcher.transports`."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.transports.base import (
    Deliver,
    FileSink,
    LinkClosed,
    LinkDropped,
    LinkNews,
    LinkResumed,
    LinkTakenOver,
    Resumption,
)
from tests.sim.storm.machines import Agent, Machine
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import Log, Message, Ready
from worker_entry.protocol.orders import Goodbye
from worker_entry.protocol.resend_buffer import is_counted

if TYPE_CHECKING:
    from tests.sim.storm.controllers import Controller

SILENCE_S = 10.0
CONNECTING_S = 20.0
"""How long it takes to find out that a node cannot be reached."""
END_WAIT_S = 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0


class Wire:
    """A connection: two directions, each in order; it may be broken at one end before the other knows."""

    def __init__(self, link: StormLink, machine: Machine) -> None:
        self.link = link
        self.machine = machine
        self.agent: Agent | None = None
        self.is_open = True
        self.to_agent = Direction(self, is_to_agent=True)
        self.to_link = Direction(self, is_to_agent=False)

    @property
    def is_healthy(self) -> bool:
        """Whether heartbeats get through both ways."""
        process = self.link.process
        return self.is_open and self.machine.is_reachable and not process.is_dead and not process.is_suspended

    def pump(self) -> None:
        self.to_agent.pump()
        self.to_link.pump()

    def reset(self) -> None:
        """Both ends lose what is under way."""
        self.is_open = False

    def close_at_agent(self) -> None:
        """The agent leaves it: the link finds its end, after everything that was sent."""
        if self.is_open:
            self.to_link.finish()

    def close_at_link(self) -> None:
        """The controller leaves it or is dead: the agent finds its end, after everything that was sent."""
        if self.is_open:
            self.to_agent.finish()


class Direction:
    """One direction of a wire."""

    def __init__(self, wire: Wire, *, is_to_agent: bool) -> None:
        self._wire = wire
        self._is_to_agent = is_to_agent
        self._items: deque[tuple[float, Message | None, bytes]] = deque()
        self._arrives = 0.0
        self._is_finished = False

    def send(self, message: Message | None, data: bytes = b"") -> None:
        if not self._wire.is_open or self._is_finished:
            return
        machine, simulation = self._wire.machine, self._wire.machine.world.simulation
        delay_s = machine.chance.choice([0.001, 0.001, 0.03, 0.3])
        self._arrives = max(self._arrives, simulation.now + delay_s)
        self._items.append((self._arrives, message, data))
        simulation.after(self._arrives - simulation.now, self.pump, machine.name)

    def finish(self) -> None:
        self.send(None)
        self._is_finished = True

    def pump(self) -> None:
        """Delivers what has arrived and can get through."""
        while self._items and self._items[0][0] <= self._wire.machine.world.simulation.now and self._is_passable:
            _, message, data = self._items.popleft()
            if self._is_to_agent:
                self._give_agent(message)
            elif self._wire.link.wire is self._wire:
                self._wire.link.take(message, data)

    @property
    def _is_passable(self) -> bool:
        wire = self._wire
        if not wire.is_open or not wire.machine.is_up or wire.machine.is_frozen:
            return False
        if self._is_to_agent:
            return "in" not in wire.machine.cuts
        process = wire.link.process
        return "out" not in wire.machine.cuts and not process.is_dead and not process.is_suspended

    def _give_agent(self, message: Message | None) -> None:
        agent = self._wire.agent
        if agent is None or agent.wire is not self._wire:
            return
        if message is None:
            agent.lose_connection()
            return
        agent.received += is_counted(message)
        agent.take(message)


class StormTransport:
    """The transport to one machine."""

    def __init__(self, controller: Controller, machine: Machine) -> None:
        self.shares_files = machine.is_local
        self._controller = controller
        self._machine = machine

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> StormLink:
        link = StormLink(self._controller, self._machine, deliver, mirror, lease_s, resumption)
        self._controller.links.append(link)
        return link


class StormLink:
    """A link to an agent, as ResumableLink is one."""

    kept = None

    def __init__(
        self,
        controller: Controller,
        machine: Machine,
        deliver: Deliver,
        mirror: FileSink,
        lease_s: float,
        resumption: Resumption | None,
    ) -> None:
        self.process = controller.process
        self.wire: Wire | None = None
        self._controller = controller
        self._world = machine.world
        self._machine = machine
        self._deliver = deliver
        self._mirror = mirror
        self._lease_s = lease_s
        self._resumption = resumption
        self._folder = resumption.reattach_folder if resumption is not None else None
        self._generation = resumption.generation if resumption is not None else 0
        self._attempt = resumption.attempt if resumption is not None else 0
        self._offsets = dict(resumption.offsets) if resumption is not None else {}
        self._began = resumption is not None
        self._is_over = self._is_ended = self._is_taken_over = self._is_finishing = self._is_abandoned = False
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._outbox: list[Message] = []
        """The orders after the first `_arrived`."""
        self._arrived = self._received = 0
        self._dropped = ""
        self._heard = self._dropped_at = self._world.simulation.now
        self._pause_s = FIRST_PAUSE_S
        self._deadline = 0.0
        if resumption is None:
            self._after(self._machine.chance.uniform(0.1, 1.5), self._open)
        else:
            self._dropped = "its controller is gone"
            self._deadline = self._world.simulation.now + (resumption.within_s or lease_s)
            self._after(0.1, self._try)

    def _after(self, seconds: float, do: Callable[[], object]) -> None:
        self.process.after(seconds, do, self._machine.name)

    # --- connecting ---

    def _open(self) -> None:
        if self._is_over:
            return
        if not self._machine.is_reachable:
            self._is_ended = True
            self._after(CONNECTING_S, lambda: self._close("it cannot be reached"))
            return
        self.wire = Wire(self, self._machine)
        self.wire.agent = self._machine.connect(self.wire)
        self._began = True
        for message in self._outbox:
            self.wire.to_agent.send(message)
        self.wire.agent.note_change()
        self._watch(self.wire)

    def _watch(self, wire: Wire) -> None:
        """Notices silence."""
        if self._is_over or wire is not self.wire:
            return
        if self._is_heard:
            self._heard = self._world.simulation.now
        if self._world.simulation.now - self._heard >= SILENCE_S:
            self.drop(f"nothing came for {SILENCE_S:g} s")
        else:
            self._after(2.0, lambda: self._watch(wire))

    @property
    def _is_heard(self) -> bool:
        wire, machine = self.wire, self._machine
        there = machine.is_up and not machine.is_frozen and "out" not in machine.cuts
        return wire is not None and wire.is_open and there and wire.agent is not None and not wire.agent.is_over

    def drop(self, reason: str) -> None:
        """The connection is broken, and known to be; it is replaced until the agent's lease expires."""
        if self._is_over or self.wire is None:
            return
        if self._is_heard:
            self._heard = self._world.simulation.now
        wire, self.wire = self.wire, None
        agent = wire.agent
        wire.reset()
        if agent is not None and agent.wire is wire:
            self._world.simulation.after(0.0, lambda: self._lose_at_agent(agent, wire), self._machine.name)
        if self._folder is None:
            self._close(reason)
            return
        self._dropped, self._dropped_at, self._pause_s = reason, self._heard, FIRST_PAUSE_S
        self._deadline = self._heard + self._lease_s
        if not self._is_finishing:
            self._tell(LinkDropped(reason))
        self._after(0.05, self._try)

    def _lose_at_agent(self, agent: Agent, wire: Wire) -> None:
        """The agent finds its connection closed, or soon unproved."""
        if agent.wire is wire and self._machine.is_reachable:
            agent.lose_connection()
        else:
            agent.note_change()

    def _try(self) -> None:
        if self._is_over or self._is_abandoned or self.wire is not None:
            return
        now = self._world.simulation.now
        if self._machine.is_reachable and self._attach():
            return
        if self._is_over:
            return
        if now >= self._deadline:
            self._close(f"{self._dropped}, and not reconnected within {self._lease_s:g} s")
            return
        self._after(min(self._pause_s, self._deadline - now), self._try)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _attach(self) -> bool:
        agent = self._machine.find(self._folder or "")
        wire = Wire(self, self._machine)
        wire.agent = agent
        self.wire = wire
        resumption = self._resumption
        received = self._received if resumption is None else resumption.handled
        why = (
            agent.attach(wire, self._generation, received, self._offsets, self._attempt)
            if agent is not None
            else "gone"
        )
        if why == "busy":  # it stops its tasks, and then ends
            self.wire = None
            return False
        if why:
            self.wire = None
            self._is_ended, self._is_taken_over = why == "gone", why == "taken-over"
            self._close(f"the agent is {why} ({self._dropped})")
        return not why

    def accepted(self, wire: Wire, received: int, first: int) -> None:
        """The agent has accepted this connection; it has received so many orders."""
        resumption, self._resumption = self._resumption, None
        self._heard = self._world.simulation.now
        if resumption is not None:
            self._received, self._arrived = first - 1, received
        else:
            del self._outbox[: received - self._arrived]
            self._arrived = received
        for message in self._outbox:
            wire.to_agent.send(message)
        self._dropped = ""
        if resumption is not None:
            self._tell(LinkTakenOver(received))
        elif not self._is_finishing:
            self._tell(LinkResumed(self._world.simulation.now - self._dropped_at))
        self._watch(wire)

    # --- reading ---

    def take(self, message: Message | None, data: bytes) -> None:
        if self._is_over:
            return
        self._heard = self._world.simulation.now
        if message is None and self.wire is not None and self.wire.agent is not None and self.wire.agent.is_over:
            self._is_ended = True
            self.wire = None
            self._close("the agent ended")
            return
        if message is None:
            self.drop("the connection was closed")
            return
        self._received += is_counted(message)
        try:
            if isinstance(message, Log):
                if self._mirror.write(message, data, self.clock_offset_s):
                    if message.attempt != self._attempt:
                        self._attempt, self._offsets = message.attempt, {}
                    self._offsets[message.task] = message.offset + len(data)
                return
            if isinstance(message, Ready):
                self._folder = message.reattach_folder
            self._deliver(self._machine.name, message, self._received)
        except OSError as error:
            self._close(f"its log cannot be written: {error.strerror}")
        except ProtocolError as error:
            self._world.break_rule("protocol", f"the agent sent {error}")

    def _tell(self, news: LinkNews) -> None:
        self._deliver(self._machine.name, news)

    def _close(self, reason: str, *, excuses: bool = True) -> None:
        if self._is_over:
            return
        self._is_over = True
        if excuses:
            self._world.excuse(f"the link to {self._machine.name} is closed: {reason}", self._world.simulation.now)
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close_at_link()
        self._over.put(None)
        self._tell(LinkClosed(reason, self._is_taken_over))

    # --- as a link ---

    @property
    def clock_offset_s(self) -> float:
        return self._machine.known_ahead_s - self._controller.timing.ahead_s

    @property
    def last_heard(self) -> float:
        return self._world.simulation.now if self._is_heard else self._heard

    def send(self, message: Message, body: bytes = b"") -> None:
        del body
        self._controller.check_fence(self._machine)
        self._controller.count_effect()
        if self._is_over or self._is_abandoned:
            return
        if is_counted(message):
            self._outbox.append(message)
        if isinstance(message, Goodbye):
            self._is_finishing = True
        if self.wire is not None:
            self.wire.to_agent.send(message)

    def confirm(self, frame: int) -> None:
        wire = self.wire
        if wire is not None and wire.agent is not None and wire.is_healthy and self._machine.chance.random() < 0.5:
            wire.agent.confirm(frame)
            self._controller.count_effect()

    def drop_if_silent(self, limit_s: float) -> None:
        silent_s = self._world.simulation.now - self.last_heard
        if self._began and silent_s > limit_s and not self._is_over:
            self.abandon()
            self._close(f"its agent did not answer for {silent_s:.0f} s", excuses=False)

    def abandon(self) -> None:
        self._is_abandoned = True
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close_at_link()

    def die(self) -> None:
        """Its controller is dead."""
        self.abandon()
        self._is_over = True

    def close(self) -> int | None:
        if not self._began:
            self._is_over = True
            return 0
        self._is_finishing = True
        if not self._is_over and not self._is_abandoned:
            if self.wire is not None:
                self.wire.to_agent.finish()
            try:
                self._controller.timing.wait(self._over, END_WAIT_S)
            except queue.Empty:
                self.abandon()
        self._is_over = True
        if self._machine.is_local:
            self._machine.clean()
            return 0
        if self._is_taken_over:
            return None
        if self._is_ended:
            return 0
        if self._folder is None or not self._machine.is_reachable:
            return None
        agent = self._machine.find(self._folder)
        if agent is not None and agent.generation > self._generation:
            return None
        self._machine.clean()
        return 0
