"""Simulated connections to machines, for real links: bytes that may be late, and be cut off anywhere."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from launcher.transports.base import (
    Deliver,
    FileSink,
    Link,
    LinkBroken,
    LinkClosed,
    LinkError,
    LinkNews,
    Resumption,
)
from launcher.transports.connector import Opening
from launcher.transports.payload import Payload
from launcher.transports.programs import STATUS_S
from launcher.transports.remote import RemoteTransport
from tests.sim.storm.agents import NodeAgent, NodePipes
from tests.sim.storm.links import CONNECTING_S
from worker_entry.agent.cleanup import AGENT_END_S
from worker_entry.agent.connection.handover import TAKEN_S
from worker_entry.agent.connection.reattach_calls import KEPT, NOT_NEEDED, TAKEN
from worker_entry.agent.connection.reattach_folder import SOCKET, read_generation
from worker_entry.protocol.framing import MARKER, Decoder, encode
from worker_entry.protocol.messages import Broken, Cleaned, Message
from worker_entry.protocol.orders import AGENT_GONE, TAKEN_OVER, Attach, Clean
from worker_entry.protocol.values import Problem

if TYPE_CHECKING:
    from tests.sim.storm.controllers import Controller
    from tests.sim.storm.machines import Machine

KILLED = -1
"""The status of a command that a signal has ended."""
DELAYS_S = (0.001, 0.001, 0.001, 0.03, 0.3)

Item = bytes | int | None
"""What travels: bytes; the end, as None; or the exit status of a command."""


class Direction:
    """One direction of a connection: in order, with delays, and only while the network lets it through."""

    def __init__(self, machine: Machine, is_passable: Callable[[], bool], take: Callable[[Item], None]) -> None:
        self._machine = machine
        self._is_passable = is_passable
        self._take = take
        self._items: deque[tuple[float, Item]] = deque()
        self._arrives = 0.0
        self._is_over = False

    def send(self, item: Item) -> None:
        if self._is_over:
            return
        chance = self._machine.chance
        while isinstance(item, bytes) and len(item) > 1 and chance.random() < 0.2:  # it is cut somewhere
            cut = chance.randrange(1, len(item))
            self._put(item[:cut])
            item = item[cut:]
        self._put(item)

    def _put(self, item: Item) -> None:
        simulation = self._machine.world.simulation
        self._arrives = max(self._arrives, simulation.now + self._machine.chance.choice(DELAYS_S))
        self._items.append((self._arrives, item))
        simulation.after(self._arrives - simulation.now, self.pump, self._machine.name)

    def pump(self) -> None:
        """Delivers what has arrived and can get through."""
        now = self._machine.world.simulation.now
        while self._items and self._items[0][0] <= now and self._is_passable():
            self._take(self._items.popleft()[1])

    def cut(self) -> None:
        """Ends it: of the bytes that are under way, only the first ones arrive, up to any byte."""
        self._is_over = True
        under_way = b"".join(item for _, item in self._items if isinstance(item, bytes))
        self._items.clear()
        if under_way and (first := under_way[: self._machine.chance.randint(0, len(under_way))]):
            self._take(first)


class Command(Protocol):
    """What a connection has started on a machine."""

    def take(self, data: bytes) -> None:
        """Bytes on its stdin; none: the end."""

    def hang_up(self) -> None:
        """The connection has ended, in both directions."""


class NodeStream:
    """A connection, as the controller has it; a `launcher.transports.streams.Stream`."""

    archive = b""

    def __init__(self, controller: Controller, machine: Machine, verb: str) -> None:
        self.machine = machine
        self._controller = controller
        self._changed = controller.timing.make_condition()
        self._data = bytearray()
        self._has_ended = self._is_hung_up = False
        self._status: int | None = None
        self._broken = ""
        self.to_node = Direction(machine, lambda: machine.is_running and "in" not in machine.cuts, self._give_command)
        self.to_link = Direction(machine, lambda: machine.is_running and "out" not in machine.cuts, self._take)
        self._command = _COMMANDS[verb](self)
        controller.streams.append(self)
        machine.streams.append(self)

    # --- for the link ---

    def read(self, size: int, timeout_s: float) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._data or self._broken) or self._has_ended, timeout_s)
            if self._data:
                data = bytes(self._data[:size])
                del self._data[:size]
                return data
            if self._has_ended and not self._broken:
                self._changed.wait_for(lambda: bool(self._broken) or self._status is not None, STATUS_S)
                if not self._broken and self._status is not None and self._status >= 0:
                    return b""
                raise LinkBroken("the connection broke")
        raise LinkBroken(self._broken or f"no data for {timeout_s:.0f} s")

    def write(self, data: bytes) -> None:
        if self._broken:
            raise BrokenPipeError(self._broken)
        if not isinstance(self._command, CleanCommand):
            self._controller.check_fence(self.machine)
        self._controller.count_effect()
        self.to_node.send(data)

    def finish(self) -> None:
        self.to_node.send(b"")

    def abandon(self) -> None:
        self.close("it was closed")

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return self._status

    # --- for the world ---

    def close(self, reason: str) -> None:
        """The controller's side ends."""
        if not self._broken:
            self._break(reason)
            self.to_node.send(None)

    def reset(self) -> None:
        """It breaks; the node's side finds out at once, later, or never."""
        if self._broken:
            return
        self.to_link.cut()
        self._break("it was reset")
        self.to_node.cut()
        self.machine.later(self.machine.chance.choice([0.0, 1.0, 30.0, 3000.0]), self._hang_up)

    def vanish(self) -> None:
        """The machine was off: nothing of it is left, which a controller notices when the machine is there again."""
        self._is_hung_up = True
        self._break("it was reset by the other side")

    def pump(self) -> None:
        self.to_node.pump()
        self.to_link.pump()

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self.machine.streams.remove(self)
        self._controller.streams.remove(self)
        self._changed.notify_all()

    def _take(self, item: Item) -> None:
        if isinstance(item, bytes):
            self._data += item
        elif item is None:
            self._has_ended = True
        else:
            self._has_ended, self._status = True, item
        self._changed.notify_all()

    def _give_command(self, item: Item) -> None:
        if self._is_hung_up:
            return
        if isinstance(item, bytes):
            self._command.take(item)
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        if not self._is_hung_up:
            self._is_hung_up = True
            self._command.hang_up()

    # --- for the command ---

    def put(self, data: bytes) -> None:
        """The command writes; no bytes: it closes its stdout."""
        self.to_link.send(data or None)

    def end(self, status: int) -> None:
        self.to_link.send(status)


class AgentCommand:
    """Starts an agent."""

    def __init__(self, stream: NodeStream) -> None:
        self._stream = stream
        self._agent: NodeAgent | None = None
        self._early: list[bytes] = []
        self._is_hung_up = False
        stream.machine.later(stream.machine.chance.uniform(0.1, 1.5), self._start)

    def _start(self) -> None:
        machine = self._stream.machine
        if self._is_hung_up:
            return
        agent = self._agent = NodeAgent(machine, self._stream.put, self._stream.end)
        machine.agents.append(agent)
        for data in self._early:
            agent.first.put(data)

    def take(self, data: bytes) -> None:
        if self._agent is None:
            self._early.append(data)
        elif not self._agent.is_over:
            self._agent.first.put(data)

    def hang_up(self) -> None:
        self._is_hung_up = True
        if self._agent is not None:
            self._agent.first.stop()


class QuestionCommand:
    """A command that reads one message, and answers it."""

    def __init__(self, stream: NodeStream) -> None:
        self._stream = stream
        self._decoder: Decoder | None = Decoder()
        """Reads the message; None once it is there."""

    def take(self, data: bytes) -> None:
        if self._decoder is None:
            self._take_more(data)
            return
        for message, _ in self._decoder.feed(data):
            self._decoder = None
            machine = self._stream.machine
            machine.later(machine.chance.uniform(0.05, 0.5), partial(self._obey, message))

    def _take_more(self, data: bytes) -> None:
        raise AssertionError(f"{data!r} after the message")

    def _obey(self, message: Message) -> None:
        raise NotImplementedError

    def hang_up(self) -> None: ...

    def _answer(self, message: Message, status: int) -> None:
        self._stream.put(MARKER + encode(message))
        self._stream.end(status)


class AttachCommand(QuestionCommand):
    """Hands its connection to an agent, as `worker_entry.agent.connection.handover` does."""

    def __init__(self, stream: NodeStream) -> None:
        super().__init__(stream)
        self._call: socket.socket | None = None
        self._pipes: NodePipes | None = None
        self._agent: NodeAgent | None = None
        self._is_taken = self._is_hung_up = False

    def _take_more(self, data: bytes) -> None:
        if self._pipes is not None:
            self._pipes.put(data)

    def _obey(self, message: Message) -> None:
        assert isinstance(message, Attach)
        if self._is_hung_up:
            return
        agent = self._agent = self._stream.machine.find_node(message.reattach_folder)
        if agent is None:
            self._answer(Broken(Problem(AGENT_GONE, "its agent has ended")), 1)
            return
        self._call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._call.connect(os.path.join(agent.folder, SOCKET))
        pipes = self._pipes = NodePipes(agent, self._stream.put)
        socket.send_fds(self._call, [encode(message)], [pipes.stdin, pipes.stdout])
        os.close(pipes.stdin)
        os.close(pipes.stdout)
        self._call.setblocking(False)
        agent.attachers.append(self)
        agent.process.main.wake()
        self._stream.machine.later(TAKEN_S, self._give_up)

    def _give_up(self) -> None:
        if not self._is_taken:
            self._leave(1)

    def look(self) -> None:
        """Reads the agent's word, if there is one."""
        while self._call is not None:
            try:
                word = self._call.recv(1)
            except BlockingIOError:
                return
            except OSError:  # the agent has ended without reading the call
                word = b""
            if word == TAKEN:
                self._is_taken = True
            elif word == NOT_NEEDED:
                self._leave(KILLED)
            elif word:
                self._leave(0 if word == KEPT else 1)
            else:
                self._close_call()  # the agent has ended; the status is that of its guardian

    def _close_call(self) -> None:
        if self._call is not None:
            self._call.close()
            self._call = None

    def note_end(self, status: int) -> None:
        """Agent and guardian have ended."""
        self.look()
        if self._is_taken:
            self._leave(status)
        else:
            self._leave(None)
            self._answer(Broken(Problem(AGENT_GONE, "its agent has ended")), 1)

    def _leave(self, status: int | None) -> None:
        """Ends, unless it still has an answer to give."""
        self._close_call()
        if self._agent is not None and self in self._agent.attachers:
            self._agent.attachers.remove(self)
            assert self._pipes is not None
            self._pipes.collect()
            if status is not None:
                self._stream.end(status)

    def hang_up(self) -> None:
        self._is_hung_up = True
        if self._pipes is not None and self._is_taken:
            self._pipes.stop()
        elif self._call is not None:
            self._leave(1)


class CleanCommand(QuestionCommand):
    """Ends agents, as `worker_entry.agent.cleanup` does."""

    def _obey(self, message: Message) -> None:
        assert isinstance(message, Clean)
        assert message.reattach_folder is not None
        agent = self._stream.machine.find_node(message.reattach_folder)
        if message.generation is not None and message.generation < read_generation(message.reattach_folder):
            self._answer(Broken(Problem(TAKEN_OVER, "another controller has taken over the run")), 1)
        elif agent is None:
            self._answer(Cleaned(0, []), 0)
        else:
            agent.ask_to_end()
            self._await(agent, AGENT_END_S)

    def _await(self, agent: NodeAgent, left_s: float) -> None:
        if left_s <= 0:
            agent.end_at_once()
        if agent.is_over:
            self._answer(Cleaned(1, []), 0)
        else:
            self._stream.machine.later(0.5, partial(self._await, agent, left_s - 0.5))


_COMMANDS: dict[str, Callable[[NodeStream], Command]] = {
    "node": AgentCommand,
    "attach": AttachCommand,
    "clean": CleanCommand,
}


class StormConnector:
    """Connects to one machine."""

    address = None

    def __init__(self, controller: Controller, machine: Machine) -> None:
        self._controller = controller
        self._machine = machine

    def open(self, payload: Payload, python: str, opening: Opening) -> NodeStream:
        del python
        timing, machine = self._controller.timing, self._machine
        timing.sleep(machine.chance.uniform(0.02, 0.5))
        if not machine.is_reachable:
            timing.sleep(min(CONNECTING_S, opening.within_s))
        if not machine.is_reachable:
            raise LinkError("it cannot be reached")
        opening.begin()
        if self._controller.is_fenced:
            machine.world.break_rule("fenced", f"a controller that was taken over connects to {machine.name}")
        return NodeStream(self._controller, machine, payload.verb)


class NodeTransport:
    """The real transport to a simulated machine."""

    shares_files = False

    def __init__(self, controller: Controller, machine: Machine, run_id: str) -> None:
        self._world = machine.world
        connector = StormConnector(controller, machine)
        self._transport = RemoteTransport(connector, "python3", run_id=run_id, timing=controller.timing)

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> Link:
        def watch(node: str, message: Message | LinkNews, frame: int = 0, /) -> None:
            if isinstance(message, LinkClosed):
                self._note_close(node, message.reason)
            deliver(node, message, frame)

        return self._transport.connect(node, watch, mirror, lease_s, resumption)

    def _note_close(self, node: str, reason: str) -> None:
        if "did not answer for" not in reason:
            self._world.excuse(f"the link to {node} is closed: {reason}", self._world.simulation.now)
        for word in ("bug in distlaunch", "protocol-error"):
            if word in reason:
                self._world.break_rule("protocol", f"{node}: {reason}")


def close_all(streams: list[NodeStream]) -> None:
    """Their controller has ended."""
    for stream in [*streams]:
        stream.close("its controller has ended")
