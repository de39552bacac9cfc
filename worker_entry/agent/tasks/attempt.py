"""Runs a node's attempts, one after the other: each begins with Prepare and ends with Empty."""

from __future__ import annotations

import contextlib
import math
import selectors
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Optional

from worker_entry.agent.checks.answers import NodeChecks
from worker_entry.agent.connection.connection import OUTPUT_LIMIT, Connection
from worker_entry.agent.files.source import FileSource
from worker_entry.agent.gpus.claims import GpuClaims
from worker_entry.agent.gpus.watch import GpuWatch
from worker_entry.agent.helpers.profile import ProfileChild
from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.agent.network.relay import Relay
from worker_entry.agent.network.tunnel import Tunnel
from worker_entry.agent.port_guards import PortGuards
from worker_entry.agent.tasks.forkserver import ForkserverClient
from worker_entry.agent.tasks.input import TaskInput
from worker_entry.agent.tasks.sampling import Sampler
from worker_entry.agent.tasks.stacks import StackDump
from worker_entry.agent.tasks.table import RunningTasks
from worker_entry.agent.tasks.task import StartedTask, TaskStartError
from worker_entry.agent.tasks.tree import NOBODY, Tree
from worker_entry.agent.tasks.watches import CacheWatch, CheckpointWatch, TaskWatch, find_checkpoints
from worker_entry.program.finding import find_problems
from worker_entry.program.versions import Files, read_own_files
from worker_entry.protocol import orders
from worker_entry.protocol.addresses import split_address
from worker_entry.protocol.collection import FindFiles, ReadFile
from worker_entry.protocol.file_names import AttemptFiles
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.gpus import ClaimGpus, ReleaseGpus
from worker_entry.protocol.messages import Empty, Log, Message, Noted, Prepared, Refused, Signalled, Status
from worker_entry.protocol.profiles import Profile
from worker_entry.protocol.resend_buffer import ResendBuffer
from worker_entry.protocol.speed import MeasureLink, MeasureNode
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import Problem
from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.network import HERE
from worker_entry.system.ports import is_auxiliary, is_port, render_unguarded

UPGRADED = Problem(
    "upgraded",
    "another version of distlaunch was installed during the run, and its tasks do not fit this version's agent",
    "`distlaunch resume` continues the run with the installed version",
)


class AttemptRunner:
    """Owns the tasks and their ports; `send` sends a message to the controller."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[Message], None],
        forkserver: ForkserverClient,
        kernel: Kernel,
    ) -> None:
        self._kernel = kernel
        self._owned = contextlib.ExitStack()
        self._selector = selector
        self._send = send
        self._handlers = self._make_handlers()
        self.checks = NodeChecks(selector, send)
        self.forkserver = forkserver
        self.files = FileSource(selector, send)
        self._owned.callback(self.files.close)
        self._gpus = GpuWatch(selector)
        self._owned.callback(self._gpus.end)
        self.gpu_claims = GpuClaims(selector, send)
        self._owned.callback(self.gpu_claims.release)
        self._profile = ProfileChild(selector, send)
        self._owned.callback(self._profile.end)
        self._outer: Optional[OuterNetwork] = None
        """The machine's network, if the tasks live in one of their own."""
        self._tunnel = Tunnel(selector, lambda text: send(Noted(text)))
        self._owned.callback(self._tunnel.end)
        self._tunnel_key: Optional[orders.TunnelKey] = None
        self._relay = Relay(selector)
        """Forwards TensorBoard's port to the tasks' own network."""
        self._owned.callback(self._relay.close)
        self._tree = self._make_tree()
        self._ports = kernel.make_ports()
        self._owned.callback(self._ports.release)
        self._guards = PortGuards(selector, send, self.checks.links.begin)
        self._owned.callback(self._guards.end)
        self._tasks = RunningTasks(self._report, self._ports, kernel)
        self._owned.callback(self._tasks.forget)
        self._owned.callback(self.checks.close)
        self._finished: Optional[Tree] = None
        """The tree of an attempt whose Empty was sent, but may not have arrived; `_tasks` still belong to it."""
        self._empty = 0
        """The number of the frame with that Empty."""
        self._number = 0
        self._prepared: set[str] = set()
        self._task_watch, self._stacks, self._sampler = TaskWatch(kernel), StackDump(kernel), Sampler(self._gpus)
        self._checkpoints, self._cache = CheckpointWatch(kernel), CacheWatch()
        self._owned.callback(self._cache.close)
        self._own_files: Files = {}
        """Our own files when the first tasks were started."""
        self._pending: Optional[orders.Start] = None
        """A Start that waits until TensorFlow is imported."""
        self._signalled = False
        """Whether the tasks have received SIGTERM from elsewhere: a second one could disturb them while they save."""

    def close(self) -> None:
        """Releases everything in reverse order, even if a step fails."""
        self._owned.close()

    @property
    def is_stopping(self) -> bool:
        return self._tree.stopping

    @property
    def is_busy(self) -> bool:
        """Whether something is under way that needs frequent polling."""
        return self._tree.stopping or bool(self._ports.forming) or self._stacks.pending or self._pending is not None

    @property
    def has_tasks(self) -> bool:
        return bool(self._tasks)

    @property
    def pids(self) -> list[int]:
        """The tasks' own processes."""
        return self._tasks.pids

    @property
    def is_isolated(self) -> bool:
        """Whether this process has a network of its own."""
        return self._outer is not None

    def leave_network(self, outer: OuterNetwork) -> None:
        """Called before this process enters a network of its own."""
        self._outer = self.gpu_claims.outer = outer
        self._owned.callback(outer.end)
        self._tree = self._make_tree()

    # --- orders ---

    def handle(self, order: Message, body: bytes, hello: orders.Hello) -> None:
        """Obeys an order about tasks; `hello`: the controller's.

        Raises:
            ProtocolError: the message is no order, or cannot be obeyed now.
        """
        handler = self._handlers.get(type(order))
        if handler is None:
            raise ProtocolError(f"{type(order).__name__}, which only agents send")
        handler(order, body, hello)

    def _make_handlers(self) -> dict[type[Any], Callable[[Any, bytes, orders.Hello], None]]:
        def check(order: Any, _: bytes, hello: orders.Hello) -> None:
            self.checks.take(order, hello)

        return {
            orders.Prepare: lambda order, _, hello: self.prepare(order, hello),
            **dict.fromkeys((orders.Inspect, orders.Dial, MeasureNode, MeasureLink), check),
            orders.Start: lambda order, _, hello: self.accept(order, hello.cwd),
            orders.Input: lambda order, body, _: self.take_input(order, body),
            orders.Stop: lambda order, _, __: self.obey(order),
            orders.ShowStacks: lambda _, __, ___: self.show_stacks(),
            Profile: lambda order, _, __: self.profile(order),
            FindFiles: lambda order, _, hello: self.files.find(order, hello),
            ReadFile: lambda order, _, hello: self.files.ask(order, hello.cwd),
            ClaimGpus: lambda order, _, hello: self.gpu_claims.claim(order, hello.run_id),
            ReleaseGpus: lambda _, __, ___: self.gpu_claims.release(),
        }

    def prepare(self, order: orders.Prepare, hello: orders.Hello) -> None:
        """Checks the tasks' programs and holds their ports; answers with Prepared or Refused.

        Raises:
            ProtocolError: an attempt is running, or a port number is invalid.
        """
        self.forget_finished()
        if self._tasks:
            raise ProtocolError(f"Prepare while attempt {self._number} is running")
        if not all(is_port(port) for port in (order.first_port, order.last_port, *(r.port or 1 for r in order.tasks))):
            raise ProtocolError("Prepare with an invalid port")
        if order.tunnel is not None and self._outer is None:
            raise ProtocolError("Prepare with a tunnel, but no other network")
        self._release_ports()
        self._tunnel_key = order.tunnel
        outer = None if order.tunnel is None else self._outer
        self._ports.network, self._guards.outer, self.checks.outer = outer or HERE, outer, outer
        self._ports.shown_network = self._outer or HERE  # TensorBoard's port has to be free there too
        self.forkserver.revive()
        problems = find_problems(order.tasks, hello.cwd)
        problems += self._ports.hold(order.tasks, order.first_port, order.last_port, guard=order.guard != "off")
        self._number = order.attempt
        self._prepared = set() if problems else {request.task for request in order.tasks}
        problems += render_unguarded(self._ports.unguarded) if order.guard == "required" else []
        if not problems:
            self._guards.begin(self._ports, order.allowed, order.nonce, required=order.guard == "required")
        if not problems and order.nonce:
            answering = {task: self._ports.numbers[task] for task in self._ports.unguarded}
            problems = self.checks.open_responders(answering, order.nonce)
        if problems:
            self._release_ports()
            self._send(Refused(problems))
        else:
            if self._outer is not None:
                self._relay.bring_out(self._ports.numbers, self._outer, self._send)
            self._send(Prepared(order.attempt, dict(self._ports.numbers), dict(self._ports.unguarded)))

    def accept(self, order: orders.Start, cwd: str) -> None:
        """Takes an order to start tasks; `step` starts them when the forkserver is ready.

        Raises:
            ProtocolError: the tasks were not prepared, or are running.
        """
        names = {start.task for start in order.tasks}
        if names and order.attempt == self._number and all(map(self._tasks.is_running, names)):
            return  # a controller that takes over cannot know whether the order has arrived
        busy = any(map(self._tasks.is_running, names)) or self._pending is not None or self._tree.stopping
        if busy or order.attempt != self._number or len(names) < len(order.tasks) or names - self._prepared:
            raise ProtocolError(f"Start of tasks that were not prepared: {', '.join(sorted(names))[:80]}")
        self.checks.end_marks()
        self.checks.close()
        self._signalled = False
        addresses = [split_address(address) for group in order.cluster.values() for address in group]
        self._stacks.cluster_ports = frozenset(int(port) for _, port in addresses if port.isdecimal())
        hosts = order.routes.values() or (host for host, _ in addresses)
        self._guards.learn({*hosts, *order.callers})
        if self._tunnel_key is not None and self._outer is not None:
            own = {task: port for task, port in self._ports.numbers.items() if not is_auxiliary(task)}
            self._tunnel.begin(order, own, self._tunnel_key, self._outer)
        self._pending = order
        for start in order.tasks[:1]:  # all run the same program
            self.forkserver.expect(start.program, cwd)

    def take_input(self, part: orders.Input, body: bytes) -> None:
        """Gives a task what it reads next from stdin."""
        task = self._tasks.by_name.get(part.task)
        if task is not None and task.input is not None:
            task.input.take(part, body)

    def ask_input(self) -> None:
        """Requests the tasks' next input again over a new connection: the last answer may not have arrived."""
        for task in self._tasks.by_name.values():
            if task.input is not None:
                task.input.ask()

    def _make_input(self, task: str) -> TaskInput:
        return TaskInput(task, self._selector, self._send)

    def show_stacks(self) -> None:
        """Collects the tasks' stacks; once the attempt has ended, there are none."""
        if self._finished is None:
            self._stacks.begin(self._tasks.by_name, self._tree.living())

    def profile(self, order: Profile) -> None:
        """Profiles tasks of this cluster, from the network in which they reach each other."""
        self._profile.begin(order)

    def obey(self, order: orders.Stop) -> None:
        """Begins to stop the tasks for the controller, which waits for Empty."""
        running = [task for name, task in self._tasks.by_name.items() if self._tasks.is_running(name)]
        longer = {task.pid: order.longer[task.name] for task in running if task.name in order.longer}
        if self._tree.interrupts and order.grace_s > 0:
            longer |= {task.pid: math.inf for task in running if task.has_handler}
        interrupted = {task.pid: not task.is_watched for task in running} if order.interrupts else None
        self.stop(order.grace_s, for_handlers=order.for_handlers, ordered=True, longer=longer, interrupted=interrupted)

    def stop(
        self,
        grace_s: float,
        *,
        for_handlers: bool = False,
        ordered: bool = False,
        longer: Mapping[int, float] = NOBODY,
        interrupted: Optional[Mapping[int, bool]] = None,
    ) -> None:
        """Begins to stop the tasks, as in orders.Stop, except that `longer` has their pids.

        `ordered`: the controller asked for it and waits for Empty. `interrupted`: as in Tree.stop.
        """
        self._profile.end()
        if self._finished is not None:
            if ordered:  # nothing of this attempt was started here
                self._send(Empty(self._number, 0, 0))
            return
        self._pending = None
        self._ports.forming.clear()
        self.checks.cancel()
        at_once = self._tasks.find_unaware(self._tree) if for_handlers else ()
        asks = not self._signalled
        self._tree.stop(grace_s, asks=asks, at_once=at_once, longer=longer, interrupted=interrupted if asks else None)

    def note_signal(self) -> bool:
        """Notes that all processes on this node have received SIGTERM; returns False: the signal is handled."""
        self._signalled = True
        self._send(Signalled(self._kernel.now()))
        return False

    # --- one turn of the loop ---

    def step(self, hello: Optional[orders.Hello], now: float) -> Optional[Problem]:
        """Starts pending tasks and reports changes; returns the problem if tasks cannot be started."""
        self._guards.poll(now)
        self.checks.poll(now)
        ready = self.forkserver.settled(now) and self._guards.settled(now) and self._tunnel.settled(now)
        problem = None if self._tree.stopping else self._tunnel.take_problem()
        if problem is None and self._pending is not None and hello is not None and ready:
            order, self._pending = self._pending, None
            problem = self._start(order, hello)
        self._tasks.note_exits(self._tree.reap(), self._tree.stopped)
        self._tasks.observe_logs()
        tasks = self._tasks.by_name
        for message in (*self._task_watch.poll(tasks, self._ports, self._tree, now), *self._stacks.poll(tasks, now)):
            self._report(message)
        sample_s = hello.sample_s if hello is not None else 0.0
        for news in (self._sampler.poll(tasks, now, sample_s), self._checkpoints.poll(now) if tasks else None):
            if news is not None:
                self._send(news)
        return problem

    def _report(self, message: Message) -> None:
        """Sends what a task reports, also at its end; says once that tasks cannot use the early import."""
        self._send(message)
        if isinstance(message, Status) and self.forkserver.is_refused(message.status):
            self._send(Noted(f"tasks start again without the early import: {message.status.not_forked}"))

    def stream_logs(self, connection: Connection) -> None:
        stream_logs(self._tasks.log_queue, self._number, connection)

    def stream_files(self, connection: Connection) -> None:
        """Sends parts of files that the controller has asked for."""
        self.files.stream(connection)

    def finish(self, outbox: ResendBuffer, *, logs_first: bool) -> None:
        """Ends an attempt whose processes are all gone; with `logs_first`, only when its logs are sent."""
        if not self._tree.stopping or self._tree.sweep() != 0:
            return
        if logs_first and any(task.log.unsent() for task in self._tasks.by_name.values()):
            return
        self._tasks.observe_logs(last=True)
        self._stacks.forget()
        for last in (self._checkpoints.end(), self._cache.end(self._number)):
            if last is not None:
                self._send(last)
        self._send(Empty(self._number, len(self._tree.left_behind), len(self._tree.killed)))
        self._empty = outbox.last
        self._finished, self._tree = self._tree, self._make_tree()
        self._prepared = set()
        self._release_ports()

    def resume(self, received: int, outbox: ResendBuffer) -> None:
        """Called before all but the first `received` frames are sent again over a new connection.

        Raises:
            ProtocolError: fewer frames were sent.
        """
        outbox.after(received)
        if self._finished is not None and received < self._empty:
            # Empty did not arrive, so the logs before it may be missing as well; send it again after them.
            outbox.take_back(self._empty)
            self._tree, self._finished = self._finished, None

    def rewind(self, attach: orders.Attach) -> None:
        """Sends the logs again from the offsets that the controller has reached."""
        self._tasks.rewind(attach, self._number)

    def report_again(self) -> None:
        """Sends again what is known of every task, unless the controller knows that all have ended."""
        if self._finished is None:
            self._tasks.report_again()

    def _start(self, order: orders.Start, hello: orders.Hello) -> Optional[Problem]:
        if not self._tasks:
            self._tree = self._make_tree()
            self._checkpoints.begin(find_checkpoints(order, hello.cwd))
        if self._own_files and read_own_files() != self._own_files:
            return UPGRADED
        try:
            files = AttemptFiles(hello.directory, order.attempt)
            with self._cache.starting(order.tasks):
                self._tasks.start(order, files, hello.cwd, self._tree, self.forkserver, self._make_input)
        except TaskStartError as error:
            return error.problem
        self._own_files = self._own_files or read_own_files()
        return None

    def _make_tree(self) -> Tree:
        outer = set() if self._outer is None else self._outer.pids
        own = (self.forkserver, self.files, self._gpus, self.gpu_claims, self._profile, self._tunnel)
        return Tree(self._kernel, *(part.pids for part in own), self.checks.speed.pids, self.checks.links.pids, outer)

    def _release_ports(self) -> None:
        self.checks.close()
        self._tunnel.end()
        self._guards.end()
        self._ports.release()

    def forget_finished(self) -> None:
        """Drops an attempt whose Empty was sent: nothing of it is sent again."""
        if self._finished is None:
            return
        self._tasks.forget()
        self._finished = None


def stream_logs(log_queue: deque[StartedTask], attempt: int, connection: Connection) -> None:
    """Sends one piece of each task's log in turn, so that a chatty task does not delay the others.

    Returns when everything is sent or the connection has enough to write.
    """
    exhausted = 0
    while exhausted < len(log_queue) and connection.pending < OUTPUT_LIMIT:
        task = log_queue[0]
        log_queue.rotate(-1)
        offset, data, hole, marks = task.log.read()
        if hole:
            connection.send(Noted(f"the log of {task.name} has a hole of {render_size(hole)}, which is skipped"))
        if data or marks:
            connection.send_part(Log(attempt, task.name, offset, len(data), marks), data)
        exhausted = 0 if data else exhausted + 1
