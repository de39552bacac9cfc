"""The machine below a real agent, simulated: its clock, its tasks' processes and its ports."""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from tests.sim.storm.simulation import BEGAN
from tests.sim.storm.tasks import TaskProcess, name_members
from worker_entry.protocol.file_names import AttemptFiles
from worker_entry.protocol.framing import parse
from worker_entry.protocol.frozen import asdict
from worker_entry.protocol.messages import Exited, Halted, InterruptTaken, Listening, Message, Returned, Saved, Status
from worker_entry.protocol.node_local import STACKS_SIGNAL
from worker_entry.protocol.values import CrashRecord, Problem, TaskExit, TaskOrder, TaskRequest
from worker_entry.system.kernel import Process
from worker_entry.system.memory import OomWatch
from worker_entry.system.ports import HeldPorts
from worker_entry.system.process_use import ProcessUse

if TYPE_CHECKING:
    from tests.sim.storm.agents import NodeAgent

FIRST_PID = 1 << 24
"""Above all pids that Linux gives."""
NOWHERE = "/nonexistent"
CONTINUED, STOPPED = 0xFFFF, 0x7F
"""Wait statuses: of a process that goes on, and the low byte for one that a signal has stopped."""
BUSY_BYTES_S = 1 << 20
"""What a task that is at work reads each second."""


class SimulatedSelector(selectors.DefaultSelector):
    """Descriptors are real, and ready when the simulation has written to them; time passes only in `select`."""

    def __init__(self, agent: NodeAgent) -> None:
        super().__init__()
        self._agent = agent

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        self._agent.collect()
        self._agent.process.current.pause(timeout if timeout is not None else float("inf"))
        return super().select(0)


class SimulatedPorts(HeldPorts):
    """Ports of a machine that no other program uses."""

    def __init__(self, kernel: SimulatedKernel, first: int) -> None:
        super().__init__()
        self._kernel = kernel
        self._first = first

    def hold(self, requests: list[TaskRequest], first: int, last: int, *, guard: bool = True) -> list[Problem]:
        del first, last, guard
        machine = self._kernel.machine
        if machine.refusals:
            machine.world.excuse(f"{machine.name} refuses", machine.world.simulation.now)
            return [Problem(machine.refusals.pop(0), "it cannot be done")]
        tasks = sorted(request.task for request in requests)
        self.numbers.update({task: self._first + number for number, task in enumerate(tasks)})
        return []

    def _is_open(self, task: str, port: int) -> bool:
        del port
        return task in self._kernel.listening


class SimulatedKernel:
    """One agent's machine; it is also the host of the agent's tasks."""

    def __init__(self, agent: NodeAgent) -> None:
        self.agent = agent
        self.machine = agent.machine
        self.world = agent.world
        self.processes: dict[int, TaskProcess] = {}
        """All that were started, by pid."""
        self.listening: set[str] = set()
        self._files: dict[TaskProcess, AttemptFiles] = {}
        self._outputs: dict[TaskProcess, int] = {}
        self._pids = itertools.count(FIRST_PID)
        self._changes: list[tuple[int, int]] = []
        self._unreaped: set[int] = set()
        self._pending: dict[TaskProcess, list[int]] = {}
        """Signals that wait until a suspended task goes on."""
        self._signalled = -1
        self._ahead_s = agent.machine.ahead_s
        """How far the machine's clock was ahead when the agent began: an agent follows no later jumps."""
        self.end: Callable[[], None] = lambda: None
        self.warn: Callable[[], None] | None = None

    # --- time and the loop ---

    def monotonic(self) -> float:
        return self.world.simulation.now

    def now(self) -> float:
        return BEGAN + self.world.simulation.now + self._ahead_s

    def time(self) -> float:
        return self.now()

    def steady(self, moment: float) -> float:
        return moment - BEGAN - self._ahead_s

    def make_selector(self) -> selectors.BaseSelector:
        return SimulatedSelector(self.agent)

    def wake_on_signals(self, end: Callable[[], None], warn: Callable[[], None] | None) -> int:
        self.end, self.warn = end, warn
        wake, self._signalled = os.pipe()
        self.agent.keep(wake, self._signalled)
        for descriptor in (wake, self._signalled):
            os.set_blocking(descriptor, False)
        return wake

    def interrupt(self) -> None:
        """Wakes the agent, as a signal does."""
        if self._signalled >= 0 and not self.agent.process.is_dead:
            os.write(self._signalled, b"\0")
            self.agent.process.main.wake()

    # --- processes ---

    def spawn(
        self, argv: Sequence[str], *, env: dict[str, str], cwd: str, output: int, stdin: int | None = None
    ) -> int:
        del cwd, stdin
        with open(argv[-1], encoding="utf-8") as stream:
            order: TaskOrder = parse(TaskOrder, json.load(stream), "order")
        assert order.status_file is not None
        folder, _, file = order.status_file.rpartition("/")
        root, _, attempt = folder.rpartition("/attempt-")
        name = file.removesuffix(".status.json").replace("-", ":")
        earlier = [task for task in self.processes.values() if (task.name, task.attempt) == (name, int(attempt))]
        task = TaskProcess(self, name, int(attempt), len(earlier) + 1)
        pid = next(self._pids)
        self.processes[pid] = task
        self._files[task] = AttemptFiles(root, int(attempt))
        self._outputs[task] = os.dup(output)
        if task.has_handler:
            _touch(order.handler_file)
        self.agent.attempt = int(attempt)
        self.world.note_spawn(task)
        cluster: frozenset[str] = frozenset()
        if "TF_CONFIG" in env:
            config = json.loads(env["TF_CONFIG"])
            cluster = name_members(*((kind, len(addresses)) for kind, addresses in config["cluster"].items()))
            if f"{config['task']['type']}:{config['task']['index']}" != name:
                self.world.break_rule("TF_CONFIG", f"{name} gets {config}")
        elif size := env.get("WORLD_SIZE"):
            cluster = name_members(("worker", int(size)))
        self.machine.later(0.0, partial(self._begin, task, cluster))
        return pid

    def _begin(self, task: TaskProcess, cluster: frozenset[str]) -> None:
        if task.is_alive:
            task.begin(cluster if task.name in cluster else frozenset())

    def reap(self) -> tuple[int, int] | None:
        if not self._changes:
            return None
        pid, status = self._changes.pop(0)
        if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
            self._unreaped.discard(pid)
        return pid, status

    def descendants(self, groups: Collection[int], *, spare: Collection[int], unreaped: bool = False) -> list[Process]:
        del groups, spare
        return [
            Process(pid, self.agent.pid, pid, pid, zombie=not task.is_alive)
            for pid, task in self.processes.items()
            if task.is_alive or (unreaped and pid in self._unreaped)
        ]

    def below(self, pid: int) -> list[Process]:
        del pid
        return []

    def send_signal(self, process: Process, signum: int) -> bool:
        task = self.processes[process.pid]
        if not task.is_alive:
            return False
        self._deliver(task, signum)
        return True

    def kill(self, pid: int, signum: int) -> None:
        task = self.processes[pid]
        if not task.is_alive:
            raise ProcessLookupError
        if signum == STACKS_SIGNAL and not task.is_stuck:
            with open(self._files[task].stacks(task.name), "a", encoding="utf-8") as stream:
                stream.write("Thread 1:\n  train.py\n")

    def kill_on_sight(self, spare: Collection[int]) -> set[int]:
        del spare
        return set()

    def _deliver(self, task: TaskProcess, signum: int) -> None:
        if signum == signal.SIGKILL:
            task.end(TaskExit(signal=signum))
        elif signum == signal.SIGCONT:
            task.unhalt()
            for pending in self._pending.pop(task, ()):
                self._deliver(task, pending)
        elif task.is_halted:
            self._pending.setdefault(task, []).append(signum)
        elif signum == signal.SIGINT:
            task.interrupt()
        elif signum == signal.SIGTERM:
            task.terminate()

    # --- facts ---

    def may_notice(self, pid: int, signum: int) -> bool:
        del pid, signum
        return self.world.scenario.program.on_stop != "die"

    def read_use(self, pid: int) -> ProcessUse:
        return ProcessUse(read=int(BUSY_BYTES_S * self.monotonic()) if self.processes[pid].is_at_work else 0)

    def waits(self, pid: int) -> bool:
        return not self.processes[pid].is_at_work

    def find_waiting(self, texts: Mapping[int, str], ports: Collection[int]) -> set[int]:
        del ports
        return {pid for pid in texts if self.processes[pid].is_stuck_for_certain}

    def open_files(self, pid: int) -> Collection[str]:
        task = self.processes[pid]
        return [os.path.realpath(self._files[task].stacks(task.name))]

    # --- what is made for each run ---

    def make_ports(self) -> HeldPorts:
        return SimulatedPorts(self, 20500)

    def watch_memory(self) -> OomWatch:
        return OomWatch(cgroups=NOWHERE, log=NOWHERE)

    # --- what tasks do ---

    @property
    def is_fenced(self) -> bool:
        return self.agent.is_fenced

    def write(self, task: TaskProcess, line: bytes) -> None:
        """The task prints a line."""
        os.write(self._outputs[task], line)

    def say(self, message: Message) -> None:
        """A task does something that its agent can find out."""
        match message:
            case Listening(task):
                self.listening.add(task)
            case Status(task, status):
                self._put(self._find(task).status(task), json.dumps(asdict(status)))
            case Saved():
                pass
            case Returned(task, time, crash):
                if crash is None:
                    self._put(self._find(task).finished(task), repr(time))
                else:
                    self._put_crash(task, crash)
            case InterruptTaken(task):
                _touch(self._find(task).interrupted(task))
            case Halted(task, signum):
                pid = self._find_pid(task)
                self._changes.append((pid, signum << 8 | STOPPED if signum else CONTINUED))
                self.interrupt()

    def note_end(self, task: TaskProcess, ended: Exited) -> None:
        pid = self._find_pid(task.name)
        if ended.crash is not None:
            self._put_crash(task.name, ended.crash)
        self.listening.discard(task.name)
        os.close(self._outputs.pop(task))
        how = ended.exit
        self._unreaped.add(pid)
        self._changes.append((pid, how.signal if how.signal is not None else cast("int", how.code) << 8))
        self.interrupt()

    def forget_outputs(self) -> None:
        for output in self._outputs.values():
            os.close(output)
        self._outputs.clear()

    def _find_pid(self, name: str) -> int:
        return max(pid for pid, task in self.processes.items() if task.name == name)

    def _find(self, name: str) -> AttemptFiles:
        return self._files[self.processes[self._find_pid(name)]]

    def _put_crash(self, task: str, crash: CrashRecord) -> None:
        self._put(self._find(task).crash(task), json.dumps(asdict(crash)))

    def _put(self, path: str, text: str) -> None:
        with open(f"{path}.new", "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(f"{path}.new", path)


def _touch(path: str | None) -> None:
    if path is not None:
        with open(path, "w", encoding="ascii"):
            pass
