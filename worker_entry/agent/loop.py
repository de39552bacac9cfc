"""The node agent, one per node and run: it starts the tasks, sends their logs and exits, and leaves no process behind.

It has one thread and one loop: read frames, reap children, read logs, check deadlines, write frames. `guardian`
starts it and kills what is left if the agent itself dies.

It talks to its controller over stdin and stdout. When the lease expires, the controller is gone and the agent stops
the tasks. A closed stdin means the same, unless there is a reattach folder through which the controller may come back.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from worker_entry.agent.attempts import Attempts
from worker_entry.agent.checks.inspection import introduce
from worker_entry.agent.connection import Connection
from worker_entry.agent.lease import GRACE_S, Lease
from worker_entry.agent.liveness import LoopCounter
from worker_entry.agent.reattach import ReattachFolder, Reattachment
from worker_entry.protocol import orders
from worker_entry.protocol.file_names import make_private_directory, remove_empty_directory
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.messages import Broken, Message, Noted
from worker_entry.protocol.profiles import Profile
from worker_entry.protocol.values import Problem
from worker_entry.system.engine import is_managed
from worker_entry.system.signal_wakeup import wake_on_signals
from worker_entry.system.tcp_timeout import TcpTimeout

if TYPE_CHECKING:
    from worker_entry.agent.event_files import EventFiles
    from worker_entry.agent.program_copy import ProgramCopy

TICK_S, IDLE_TICK_S = 0.05, 0.5
"""How often logs, ports and ongoing stops are polled, and the same while tasks only train and logs are not streamed."""
FIRST_LEASE_S = 60.0


class Agent:
    """Owns the tasks of one node. `run` returns when no process is left below it.

    With a reattach folder, it waits for its controller to come back after the connection has broken.
    """

    def __init__(self, reattach_folder: Optional[ReattachFolder], loop_counter: LoopCounter) -> None:
        self._owned = contextlib.ExitStack()
        """Closed at the end in reverse order, even if a step fails."""
        self._selector = self._owned.enter_context(selectors.DefaultSelector())
        self._lease = Lease(FIRST_LEASE_S, far=reattach_folder is not None)
        self._connection = Connection(self._selector, self._read, self._lose_connection, self._lease)
        self._owned.callback(self._connection.end)
        self._reattach_folder = reattach_folder
        self._loop_counter = loop_counter
        self._hello: Optional[orders.Hello] = None
        self._tcp_timeout = TcpTimeout(FIRST_LEASE_S)
        self._attempts = Attempts(self._selector, self._send)
        self._owned.callback(self._attempts.close)
        self._program_copy: Optional[ProgramCopy] = None
        self._event_files: Optional[EventFiles] = None
        self._generation = 0
        """The controller's."""
        self._closing = self._garbled = self._controller_gone = self._failed = False
        self._asked_to_end = self._signalled = False  # set by a signal handler; the signal also wakes the loop
        self._guardian = os.getppid()

    def run(self, stdin: int, stdout: int) -> int:
        """Runs the loop to its end; returns the exit status."""
        with self._owned:
            self._work(stdin, stdout)
        return 1 if self._failed else 0

    def _work(self, stdin: int, stdout: int) -> None:
        wake = wake_on_signals(self._ask_to_end, self._note_signal if is_managed() else None)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        if self._reattach_folder is not None:
            self._reattach_folder.listen()
            self._selector.register(self._reattach_folder, selectors.EVENT_READ, self._accept_reattachment)
        self._connection.open(stdin, stdout)
        while not self._done():
            self._loop_counter.advance(self._lease.end)
            self._connection.want_write()
            for key, _ in self._selector.select(self._tick()):
                if key.fd in self._selector.get_map():  # not unregistered by an earlier callback
                    key.data()
            self._step()

    # --- one turn of the loop ---

    def _done(self) -> bool:
        return self._closing and not self._attempts.is_stopping and not self._connection.pending

    def _tick(self) -> float:
        if self._program_copy is not None and not self._program_copy.waits:
            return 0.0
        return TICK_S if self._attempts.is_busy or (self._streaming and self._attempts.has_tasks) else IDLE_TICK_S

    @property
    def _streaming(self) -> bool:
        return self._hello is not None and self._hello.stream_logs and not self._controller_gone

    def _step(self) -> None:
        if self._asked_to_end or self._lease.overdue_s > 0:
            self._lose_controller()
        self._signalled = self._signalled and self._attempts.note_signal()  # before the exits that follow from it
        if self._program_copy is not None and not self._closing and self._hello is not None:
            self._program_copy.step()
            self._hello = replace(self._hello, cwd=self._program_copy.directory or self._hello.cwd)
        self._tcp_timeout.poll(self._attempts.pids)
        problem = self._attempts.step(self._hello, time.monotonic())
        if problem is not None:
            self._break(problem)
        if self._streaming and self._connection.is_open:
            self._attempts.stream_logs(self._connection)
        can_deliver = self._connection.is_open or not self._closing
        self._attempts.finish(logs_first=self._streaming and can_deliver)

    def _read(self) -> None:
        try:
            messages = self._connection.read()
            if messages is None:
                self._lose_connection()
            elif not self._garbled:  # after a protocol error, only the end of the stream counts
                for message, body in messages:
                    self._handle(message, body)
        except ProtocolError as error:
            self._garbled = True
            self._break(Problem("protocol-error", f"the agent was sent {error}"))

    def _accept_reattachment(self) -> None:
        """Uses the new connection of a controller whose old one broke, or of one that follows a controller."""
        assert self._reattach_folder is not None
        reattachment = self._reattach_folder.accept()
        if isinstance(reattachment, orders.Goodbye):
            self._ask_to_end()
        if not isinstance(reattachment, Reattachment):
            return
        if self._controller_gone or not reattachment.take():
            reattachment.leave()
            return
        attach, outbox = reattachment.attach, self._connection.outbox
        if attach.generation < self._generation:
            reattachment.refuse(Problem(orders.TAKEN_OVER, "another controller has taken over the run"))
            return
        try:
            self._check(attach)
            # Not every frame is written down where it is handled; one that is confirmed was handled as well.
            received = max(attach.received, outbox.confirmed) if attach.takeover else attach.received
            self._attempts.resume(received, outbox)
            self._connection.replace(reattachment, received)
        except ProtocolError as error:
            reattachment.refuse(Problem("protocol-error", f"the agent was sent {error}"))
            return
        if self._program_copy is not None:
            self._program_copy.resume()
        self._attempts.rewind(attach)
        if attach.takeover:
            self._generation = attach.generation
            self._reattach_folder.note_generation(attach.generation)
            self._attempts.report_again()

    def _check(self, attach: orders.Attach) -> None:
        """Raises ProtocolError if the sender is not the controller of this agent, or its successor."""
        if self._hello is None or attach.run_id not in ("", self._hello.run_id):
            raise ProtocolError("an Attach to another run")
        # A takeover of the same generation comes again: its answer was lost.
        if attach.generation == 0 if attach.takeover else attach.generation != self._generation:
            raise ProtocolError(f"an Attach of generation {attach.generation} after {self._generation}")

    def _send(self, message: Message, body: bytes = b"") -> None:
        if not self._controller_gone:
            self._connection.send(message, body)

    # --- what the controller asks for ---

    def _handle(self, message: Message, body: bytes) -> None:
        if self._closing:  # nothing new is started, but the grace period can still be shortened
            if isinstance(message, orders.Stop):
                self._attempts.stop(message.grace_s)
        elif isinstance(message, orders.Hello):
            self._greet(message)
        elif self._hello is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        elif isinstance(message, orders.Offer):
            from worker_entry.agent.program_copy import ProgramCopy

            self._program_copy = ProgramCopy(message, self._send)
            self._owned.callback(self._program_copy.abandon)
        elif isinstance(message, orders.Piece):
            if self._program_copy is not None:
                self._program_copy.take(message, body)
        elif isinstance(message, orders.Prepare):
            self._attempts.prepare(message, self._hello)
        elif isinstance(message, orders.Inspect):
            self._attempts.checks.inspect(message, self._hello)
        elif isinstance(message, orders.Dial):
            self._attempts.checks.dial(message)
        elif isinstance(message, orders.Preload):
            self._attempts.preload(message, self._hello)
        elif isinstance(message, orders.Start):
            self._attempts.accept(message, self._hello.cwd)
        elif isinstance(message, orders.ShowStacks):
            self._attempts.show_stacks()
        elif isinstance(message, Profile):
            self._attempts.profile(message)
        elif isinstance(message, orders.Scalars):
            self._write_scalars(message)
        elif isinstance(message, orders.Stop):
            self._attempts.stop(message.grace_s, ordered=True)
        elif isinstance(message, orders.Goodbye):
            self._closing = True
            if self._attempts.has_tasks:
                self._attempts.stop(GRACE_S)
        else:
            raise ProtocolError(f"{type(message).__name__}, which only agents send")

    def _write_scalars(self, order: orders.Scalars) -> None:
        if self._event_files is None:
            from worker_entry.agent.event_files import EventFiles

            self._event_files = EventFiles()
        problem = self._event_files.write(order)
        if problem is not None:
            self._send(Noted(f"TensorBoard does not show step times and goodput: {problem}"))

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
        if hello.isolated and not self._isolate():
            return
        self._hello = hello
        self._owned.callback(remove_empty_directory, hello.directory)
        self._lease.seconds = hello.lease_s
        self._tcp_timeout = TcpTimeout(hello.lease_s)
        self._loop_counter.limit_s = hello.lease_s
        if self._reattach_folder is not None:
            self._reattach_folder.note_run(hello.run_id)
        self._send(introduce(self._reattach_folder.path if self._reattach_folder is not None else None))

    def _isolate(self) -> bool:
        from worker_entry.agent.isolation.outer_network import OuterNetwork
        from worker_entry.system.isolation import enter_own_network

        try:
            outer = OuterNetwork()
            self._attempts.leave_network(outer)
            enter_own_network()
        except OSError as error:
            hint = "the system forbids such namespaces (see `sysctl user.max_user_namespaces` and its AppArmor rules)"
            self._break(Problem("no-isolation", f"no network of its own: {error.strerror}", hint))
            return False
        return True

    # --- what happens without an order ---

    def _ask_to_end(self) -> None:
        self._asked_to_end = True

    def _note_signal(self) -> None:
        """Notes a signal to the whole step, or that the guardian has died."""
        self._signalled = True
        self._asked_to_end = self._asked_to_end or os.getppid() != self._guardian

    def _lose_connection(self) -> None:
        """Handles a broken connection: with a reattach folder, the controller may come back until the lease expires."""
        if self._reattach_folder is not None and self._hello is not None:
            self._connection.close()
        else:
            self._lose_controller()

    def _lose_controller(self) -> None:
        """Stops everything, because the controller is gone or a signal asked this process to end."""
        if self._controller_gone:
            return
        self._controller_gone = True
        self._closing = True
        self._connection.close()
        # If this machine slept, the lease may have expired long ago and the tasks may run elsewhere by now: no grace.
        self._attempts.stop(GRACE_S if self._lease.overdue_s < GRACE_S else 0.0)

    def _break(self, problem: Problem) -> None:
        self._failed = True
        self._closing = True
        self._attempts.forget_finished()
        self._send(Broken(problem))
        self._attempts.stop(GRACE_S)
