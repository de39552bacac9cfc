"""Real agents on simulated machines: each is a process that runs `worker_entry.agent.agent`, and has a guardian."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.storm.kernels import SimulatedKernel
from tests.sim.storm.simulation import Killed, Process
from worker_entry.agent.agent import IDLE_TICK_S, Agent
from worker_entry.agent.connection.connection import Opening
from worker_entry.agent.connection.lease import LoopCounter
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.agent.guardian import FIRST_LIMIT_S
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.messages import Message, Ready
from worker_entry.protocol.orders import Goodbye, Prepare, Stop
from worker_entry.protocol.values import Problem, TaskExit

if TYPE_CHECKING:
    from tests.sim.storm.machines import Machine
    from tests.sim.storm.streams import AttachCommand
    from tests.sim.storm.tasks import TaskProcess

PIPE = 1 << 20
MACHINE: dict[str, Any] = {
    "pid": 4000,
    "hostname": "laptop",
    "python": "3.11.2",
    "executable": "/usr/bin/python3",
    "cores": 2,
    "gpus": [],
    "tensorflow": "2.21.0",
    "process_view": "00000000-0000-4000-8000-000000000000 pid:[4026531836] laptop",
}
"""What every simulated agent says of its machine."""


class ObservedAgent(Agent):
    """An agent that tells the world what it obeys."""

    node: NodeAgent

    def _tick(self) -> float:
        return super()._tick() if self._runner.is_stopping else IDLE_TICK_S  # simulated logs and ports may be seen late

    def _send(self, message: Message, body: bytes = b"") -> None:
        """Sends what the agent says; of itself, the same on all machines of ours: a seed cuts connections at a byte."""
        if isinstance(message, Ready):
            message = replace(message, **MACHINE)
        super()._send(message, body)

    def _handle(self, message: Message, body: bytes) -> None:
        self.node.note_order(message)
        super()._handle(message, body)

    def _lose_controller(self) -> None:
        if not self._controller_gone:
            world = self.node.world
            if self.overdue_s > 0 and not self._asked_to_end:
                world.note_expired_lease(self.node.machine)
            world.excuse(f"the agent of {self.node.machine.name} lost its controller", world.simulation.now)
        super()._lose_controller()

    def _break(self, problem: Problem) -> None:
        if problem.reference == "protocol-error":
            self.node.world.break_rule("protocol", f"{self.node.machine.name}: {problem.message}")
        super()._break(problem)

    @property
    def overdue_s(self) -> float:
        return self._lease.overdue_s


class NodeAgent:
    """An agent and its guardian, from their start on.

    Args:
        machine: where they run.
        write: takes what the agent writes to its first connection; empty: it has closed it.
        end: called with the exit status once both have ended.
    """

    def __init__(self, machine: Machine, write: Callable[[bytes], None], end: Callable[[int], None]) -> None:
        self.machine = machine
        self.world = machine.world
        self.pid = os.getpid()
        self.attempt = 0
        self.is_over = False
        self._end = end
        self._kept: list[int] = []
        """Descriptors that are closed when the process ends."""
        made = ReattachFolder.make([machine.home])
        assert made is not None
        self._reattach_folder = made
        self.folder = made.path
        self.kernel = SimulatedKernel(self)
        self.connections: list[NodePipes] = []
        self.attachers: list[AttachCommand] = []
        self._is_delayed = False
        first = NodePipes(self, write)
        opening = Opening(first.stdin, first.stdout, outlives=True)
        self._loop_counter = LoopCounter(FIRST_LIMIT_S)
        self.agent = ObservedAgent(opening, made, self._loop_counter, self.kernel)
        self.agent.node = self
        self.first = first
        self._status = 128 + signal.SIGKILL
        self.process = Process(self.world.simulation, self._run, machine.environ)
        self.process.is_suspended = machine.is_frozen

    def keep(self, *descriptors: int) -> None:
        self._kept += descriptors

    # --- the process ---

    def _run(self) -> None:
        try:
            self._status = self.agent.run()
        except Killed:
            raise
        except Exception as error:  # noqa: BLE001 - it is reported
            self.world.break_rule("bug", "".join(traceback.format_exception(error)))
        self.collect()
        self.world.simulation.after(0.0, self._guard, self.machine.name)

    def _guard(self) -> None:
        """The guardian ends what the agent has left, and itself."""
        if self.is_over:
            return
        for task in self.running:
            task.end(TaskExit(signal=signal.SIGKILL))
        self._close()
        self._reattach_folder.close(self._status)
        for attacher in [*self.attachers]:
            attacher.note_end(self._status)
        self._end(self._status)

    def _close(self) -> None:
        self.is_over = True
        self.kernel.forget_outputs()
        for descriptor in self._kept:
            os.close(descriptor)
        self._kept.clear()
        for pipes in [*self.connections]:
            pipes.close()
        if (listener := self._reattach_folder._socket) is not None:
            listener.close()

    def collect(self) -> None:
        """Takes what the agent has written to its connections."""
        for pipes in [*self.connections]:
            pipes.collect()
        for attacher in [*self.attachers]:
            attacher.look()

    # --- for the world ---

    @property
    def running(self) -> list[TaskProcess]:
        return [task for task in self.kernel.processes.values() if task.is_alive]

    @property
    def is_fenced(self) -> bool:
        """Whether everything below it will certainly end before it can act: its machine sleeps past its lease."""
        return not self.machine.is_up or (self.machine.is_frozen and self.agent.overdue_s > 0)

    def note_order(self, order: Message) -> None:
        if self.machine.delays and not self.running and not isinstance(order, (Stop, Goodbye)):
            self._delay(self.machine.delays.pop(0))
        if isinstance(order, Prepare):
            self.attempt = order.attempt
        self.world.note_order(self, order)

    def note_change(self) -> None:
        self.process.is_suspended = self.machine.is_frozen or self._is_delayed

    def note_signal(self) -> None:
        """All processes on the node get SIGTERM from Slurm."""
        (self.kernel.warn or self.kernel.end)()
        self.kernel.interrupt()
        for task in self.running:
            task.terminate()

    def _delay(self, seconds: float) -> None:
        """Its process does not run for this time; its guardian may kill it."""
        limit_s = self._loop_counter.limit_s
        self.world.excuse(f"{self.machine.name} is late by {seconds:g} s", self.world.simulation.now)
        self._is_delayed = True
        self.note_change()
        if seconds > limit_s:
            self.machine.later(limit_s, self.end_at_once)
        else:
            self.machine.later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._is_delayed = False
        self.note_change()

    def end_at_once(self) -> None:
        """It is killed, and its guardian ends everything below it."""
        if not self.is_over:
            self.process.kill()
            self._guard()

    def ask_to_end(self) -> None:
        """Its guardian gets a signal, and passes it on."""
        self.kernel.end()
        self.kernel.interrupt()

    def vanish(self) -> None:
        """Its machine is off."""
        if self.is_over:
            return
        for task in self.running:
            task.vanish()
        self.process.kill()
        self._close()
        self._reattach_folder.close(1)


class NodePipes:
    """The pipes between an agent and the process that holds its connection; `write` takes what comes out."""

    def __init__(self, agent: NodeAgent, write: Callable[[bytes], None]) -> None:
        self._agent = agent
        self._write = write
        self.stdin, self._to_agent = os.pipe()
        self._from_agent, self.stdout = os.pipe()
        os.set_blocking(self._from_agent, False)
        os.set_blocking(self._to_agent, False)
        agent.connections.append(self)

    def put(self, data: bytes) -> None:
        """Gives the agent bytes to read; no bytes: the end."""
        if self._to_agent < 0:
            return
        if data:
            with contextlib.suppress(BrokenPipeError):
                assert os.write(self._to_agent, data) == len(data)
        else:
            os.close(self._to_agent)
            self._to_agent = -1
        self._agent.process.main.wake()

    def collect(self) -> None:
        while self._from_agent >= 0:
            try:
                data = os.read(self._from_agent, PIPE)
            except BlockingIOError:
                return
            if not data:
                os.close(self._from_agent)
                self._from_agent = -1
            self._write(data)

    def stop(self) -> None:
        """The other side no longer reads."""
        self.put(b"")
        if self._from_agent >= 0:
            os.close(self._from_agent)
            self._from_agent = -1

    def close(self) -> None:
        """The agent has ended."""
        self.collect()
        self._agent.connections.remove(self)
        for descriptor in (self._to_agent, self._from_agent):
            if descriptor >= 0:
                os.close(descriptor)
        self._to_agent = self._from_agent = -1
