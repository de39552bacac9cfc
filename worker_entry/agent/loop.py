"""The node agent: one per node and run. It starts the tasks, sends their logs and ends, and leaves nothing behind.

It has one thread and one loop: frames in, deaths, log files that grew, deadlines, frames out. `guardian` starts it,
and takes care that its own death leaves nothing behind either.

It talks to its controller over stdin and stdout. Silence for longer than the lease means that the controller is gone:
the tasks are stopped. So does a closed stdin, unless there is a meeting place where the controller may come back.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from worker_entry.agent.checks.answers import NodeChecks
from worker_entry.agent.checks.inspection import introduce
from worker_entry.agent.connection import Connection
from worker_entry.agent.forkserver_client import ForkserverClient
from worker_entry.agent.lease import GRACE_S, Lease
from worker_entry.agent.liveness import Turns
from worker_entry.agent.log_stream import stream_logs
from worker_entry.agent.reattach import ReattachFolder, Reattachment
from worker_entry.agent.stacks import StackDump
from worker_entry.agent.task_process import TaskStartError
from worker_entry.agent.task_table import RunningTasks
from worker_entry.agent.task_watch import TaskWatch
from worker_entry.program.finding import find_problems
from worker_entry.protocol import orders
from worker_entry.protocol.file_names import AttemptFiles, make_private_directory, remove_empty_directory
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import Broken, Empty, Message, Noted, Prepared, Refused, Status
from worker_entry.protocol.values import Problem
from worker_entry.system import processes
from worker_entry.system.ports import HeldPorts, is_port
from worker_entry.system.signal_wakeup import wake_on_signals
from worker_entry.system.tcp_timeout import TcpTimeout

if TYPE_CHECKING:
    from worker_entry.agent.program_copy import ProgramCopy

TICK_S = 0.05
"""How often growing logs, opened ports and ongoing stops are looked at."""
IDLE_TICK_S = 0.5
"""The same while nothing is under way but training without log streaming."""
FIRST_LEASE_S = 60.0
FORKSERVER_LOG = "forkserver.log"


class Agent:
    """Owns the tasks of one node. `run` returns once no process is left below it.

    With a `meeting`, it waits there for its controller to come back when the connection breaks.
    """

    def __init__(self, reattach_folder: Optional[ReattachFolder], turns: Turns) -> None:
        self._owned = contextlib.ExitStack()
        """What has to be closed at the end: in reverse order, all of it, whatever goes wrong."""
        self._selector = self._owned.enter_context(selectors.DefaultSelector())
        self._lease = Lease(FIRST_LEASE_S, far=reattach_folder is not None)
        self._connection = Connection(self._selector, self._read, self._lose_connection, self._lease)
        self._owned.callback(self._connection.end)
        self._reattach_folder = reattach_folder
        self._turns = turns
        self._hello: Optional[orders.Hello] = None
        self._tcp_timeout = TcpTimeout(FIRST_LEASE_S)
        self._forkserver = ForkserverClient(self._selector)
        self._owned.callback(self._forkserver.end)
        self._tree = processes.Tree(self._forkserver.pids)
        self._ports = HeldPorts()
        self._owned.callback(self._ports.release)
        self._tasks = RunningTasks(self._send, self._ports)
        self._owned.callback(self._tasks.forget)
        self._finished: Optional[processes.Tree] = None
        """The tree of the attempt whose Empty was sent, and may yet get lost; `_tasks` are still its own."""
        self._attempt = 0
        self._prepared: set[str] = set()
        self._watch, self._stacks = TaskWatch(), StackDump()
        self._waiting: Optional[orders.Start] = None
        """A Start that has to wait until TensorFlow is imported."""
        self._replica: Optional[ProgramCopy] = None
        self._checks = NodeChecks(self._selector, self._send)
        self._owned.callback(self._checks.close)
        self._closing = self._garbled = self._controller_gone = self._failed = False
        self._asked_to_end = False  # set by signals, seen by the loop, which they wake

    def run(self, stdin: int, stdout: int) -> int:
        """Works until the end; returns the exit status."""
        with self._owned:
            self._work(stdin, stdout)
        return 1 if self._failed else 0

    def _work(self, stdin: int, stdout: int) -> None:
        wake = wake_on_signals(self._ask_to_end)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        if self._reattach_folder is not None:
            self._reattach_folder.listen()
            self._selector.register(self._reattach_folder, selectors.EVENT_READ, self._meet)
        self._connection.open(stdin, stdout)
        while not self._done():
            self._turns.count(self._lease.end)
            self._connection.want_write()
            for key, _ in self._selector.select(self._tick()):
                if key.fd in self._selector.get_map():  # not taken out by one of the others
                    key.data()
            self._step()

    # --- one turn of the loop ---

    def _done(self) -> bool:
        return self._closing and not self._tree.stopping and not self._connection.pending

    def _tick(self) -> float:
        if self._replica is not None and not self._replica.waits:
            return 0.0
        busy = self._tree.stopping or self._ports.forming or self._stacks.pending or self._waiting is not None
        return TICK_S if busy or (self._streaming and self._tasks) else IDLE_TICK_S

    @property
    def _streaming(self) -> bool:
        return self._hello is not None and self._hello.stream_logs and not self._controller_gone

    def _step(self) -> None:
        now = time.monotonic()
        if self._asked_to_end or self._lease.overdue_s > 0:
            self._lose_controller()
        if self._replica is not None and not self._closing and self._hello is not None:
            self._replica.step()
            self._hello = replace(self._hello, cwd=self._replica.directory or self._hello.cwd)
        self._tcp_timeout.look(self._tasks.pids)
        if self._waiting is not None and self._hello is not None and self._forkserver.settled(now):
            order, self._waiting = self._waiting, None
            self._start(order, self._hello)
        for pid, status in self._tree.reap():
            self._tasks.note_exit(pid, status)
        tasks = self._tasks.by_name
        for seen in (*self._watch.look(tasks, self._ports, self._tree, now), *self._stacks.look(tasks, now)):
            self._send(seen)
            if isinstance(seen, Status) and self._forkserver.is_refused(seen.status):
                self._send(Noted(f"tasks start again without the early import: {seen.status.not_forked}"))
        if self._streaming and self._connection.is_open:
            stream_logs(self._tasks.turns, self._attempt, self._connection)
        if self._tree.stopping and self._tree.sweep() == 0:
            self._finish_attempt()

    def _read(self) -> None:
        try:
            messages = self._connection.read()
            if messages is None:
                self._lose_connection()
            elif not self._garbled:  # else only the end of the stream means something
                for message, body in messages:
                    self._handle(message, body)
        except ProtocolError as error:
            self._garbled = True
            self._break(Problem("protocol-error", f"the agent was sent {error}"))

    def _meet(self) -> None:
        """A controller whose connection broke is back."""
        assert self._reattach_folder is not None
        reattachment = self._reattach_folder.accept()
        if isinstance(reattachment, orders.Goodbye):
            self._ask_to_end()
        if not isinstance(reattachment, Reattachment):
            return
        if self._controller_gone or not reattachment.take():
            reattachment.leave()
            return
        attach = reattachment.attach
        try:
            outbox = self._connection.outbox
            if outbox.after(attach.received) and self._finished is not None:
                # Empty has not arrived, so the logs before it may not have, either; it comes again behind them.
                outbox.take_back()
                self._tree, self._finished = self._finished, None
            self._connection.replace(reattachment)
        except ProtocolError as error:
            reattachment.refuse(str(error))
            return
        if self._replica is not None:
            self._replica.resume()
        self._tasks.rewind(attach, self._attempt)

    def _send(self, message: Message, body: bytes = b"") -> None:
        if not self._controller_gone:
            self._connection.send(message, body)

    # --- what the controller asks for ---

    def _handle(self, message: Message, body: bytes) -> None:
        if self._closing:  # nothing new begins; a stop can still be shortened
            if isinstance(message, orders.Stop):
                self._stop(message.grace_s)
        elif isinstance(message, orders.Hello):
            self._greet(message)
        elif self._hello is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        elif isinstance(message, orders.Offer):
            from worker_entry.agent.program_copy import ProgramCopy

            self._replica = ProgramCopy(message, self._send)
            self._owned.callback(self._replica.abandon)
        elif isinstance(message, orders.Piece):
            if self._replica is not None:
                self._replica.take(message, body)
        elif isinstance(message, orders.Prepare):
            self._prepare(message, self._hello)
        elif isinstance(message, orders.Inspect):
            self._checks.inspect(message, self._hello)
        elif isinstance(message, orders.Dial):
            self._checks.dial(message)
        elif isinstance(message, orders.Preload):
            self._forkserver.begin(message, self._hello.cwd, os.path.join(self._hello.directory, FORKSERVER_LOG))
        elif isinstance(message, orders.Start):
            self._accept(message, self._hello.cwd)
        elif isinstance(message, orders.ShowStacks):
            self._stacks.begin(self._tasks.by_name, self._tree.living())
        elif isinstance(message, orders.Stop):
            if self._finished is not None:  # the controller stops an attempt of which nothing has begun here
                self._send(Empty(self._attempt, 0, 0))
            self._stop(message.grace_s)
        elif isinstance(message, orders.Goodbye):
            self._closing = True
            if self._tasks:
                self._stop(GRACE_S)
        else:
            raise ProtocolError(f"{type(message).__name__}, which only agents send")

    def _greet(self, hello: orders.Hello) -> None:
        if hello.version != orders.VERSION:
            raise ProtocolError(f"version {hello.version} of the protocol; this agent speaks {orders.VERSION}")
        if self._hello is not None:
            raise ProtocolError("a second Hello")
        hello = replace(hello, directory=os.path.expanduser(hello.directory), cwd=os.path.expanduser(hello.cwd))
        try:
            make_private_directory(hello.directory)
        except OSError as error:
            hint = "choose another directory" if self._reattach_folder is None else "make it writable"
            self._break(Problem("run-directory", f"{error.filename}: {error.strerror}", hint))
            return
        self._hello = hello
        self._owned.callback(remove_empty_directory, hello.directory)
        self._lease.seconds = hello.lease_s
        self._tcp_timeout = TcpTimeout(hello.lease_s)
        self._turns.limit_s = hello.lease_s
        if self._reattach_folder is not None:
            self._reattach_folder.note_run(hello.run_id)
        self._send(introduce(self._reattach_folder.path if self._reattach_folder is not None else None))

    def _prepare(self, order: orders.Prepare, hello: orders.Hello) -> None:
        self._forget_finished()
        if self._tasks:
            raise ProtocolError(f"Prepare while attempt {self._attempt} is running")
        if not all(is_port(port) for port in (order.first_port, order.last_port, *(r.port or 1 for r in order.tasks))):
            raise ProtocolError("Prepare with a port that cannot be")
        self._release_ports()
        self._forkserver.revive(hello.cwd, os.path.join(hello.directory, FORKSERVER_LOG))
        problems = find_problems(order.tasks, hello.cwd)
        problems += self._ports.hold(order.tasks, order.first_port, order.last_port)
        self._attempt = order.attempt
        self._prepared = set() if problems else {request.task for request in order.tasks}
        if not problems and order.nonce:
            problems = self._checks.open_doors(self._ports.numbers, order.nonce)
        if problems:
            self._release_ports()
            self._send(Refused(problems))
        else:
            self._send(Prepared(order.attempt, dict(self._ports.numbers)))

    def _accept(self, order: orders.Start, cwd: str) -> None:
        names = {start.task for start in order.tasks}
        busy = any(self._tasks.is_running(name) for name in names) or self._waiting is not None or self._tree.stopping
        if busy or order.attempt != self._attempt or len(names) < len(order.tasks) or names - self._prepared:
            raise ProtocolError(f"Start of what was not prepared: {', '.join(sorted(names))[:80]}")
        self._checks.close()
        self._waiting = order
        for start in order.tasks[:1]:  # all run the same program
            self._forkserver.expect(start.program, cwd)

    def _start(self, order: orders.Start, hello: orders.Hello) -> None:
        if not self._tasks:
            self._tree = processes.Tree(self._forkserver.pids)
        try:
            files = AttemptFiles(hello.directory, order.attempt)
            self._tasks.start(order, files, hello.cwd, self._tree, self._forkserver)
        except TaskStartError as error:
            self._break(error.problem)

    def _stop(self, grace_s: float) -> None:
        if self._finished is not None:
            return
        self._waiting = None
        self._ports.forming.clear()
        self._checks.mute()
        self._tree.stop(grace_s)

    # --- what happens by itself ---

    def _finish_attempt(self) -> None:
        heard = self._connection.is_open or not self._closing
        if self._streaming and heard and any(task.unsent() for task in self._tasks.by_name.values()):
            return  # the rest of the logs goes first
        self._send(Empty(self._attempt, len(self._tree.left_behind), len(self._tree.killed)))
        self._finished, self._tree = self._tree, processes.Tree(self._forkserver.pids)
        self._prepared = set()
        self._release_ports()

    def _release_ports(self) -> None:
        self._checks.close()
        self._ports.release()

    def _forget_finished(self) -> None:
        """The controller has heard of the end of the last attempt."""
        if self._finished is None:
            return
        self._tasks.forget()
        self._finished = None

    def _ask_to_end(self) -> None:
        self._asked_to_end = True

    def _lose_connection(self) -> None:
        """The way is broken: the controller may find another one, if it knows where, until the lease is over."""
        if self._reattach_folder is not None and self._hello is not None:
            self._connection.close()
        else:
            self._lose_controller()

    def _lose_controller(self) -> None:
        """The controller is gone, or somebody asked us to end: nobody is left to talk to."""
        if self._controller_gone:
            return
        self._controller_gone = True
        self._closing = True
        self._connection.close()
        # After a sleep of this machine it may be long over, and the tasks have been started elsewhere.
        self._stop(GRACE_S if self._lease.overdue_s < GRACE_S else 0.0)

    def _break(self, problem: Problem) -> None:
        self._failed = True
        self._closing = True
        self._forget_finished()
        self._send(Broken(problem))
        self._stop(GRACE_S)
