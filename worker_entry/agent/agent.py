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
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

from worker_entry.agent.connection.connection import Connection, Opening, Reattaching
from worker_entry.agent.connection.lease import GRACE_S, Lease, LoopCounter
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.agent.warm.keep import KeepWarm
from worker_entry.program.versions import installed_version
from worker_entry.protocol import orders
from worker_entry.protocol.file_names import make_private_directory, remove_empty_directory
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.messages import Broken, Message, Noted, Ready
from worker_entry.protocol.orders import VERSION
from worker_entry.protocol.values import Problem
from worker_entry.system import hardware
from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.engine import is_managed
from worker_entry.system.machine import process_view
from worker_entry.system.tcp_timeout import TcpTimeout

if TYPE_CHECKING:
    from worker_entry.agent.files.copy import FolderCopy
    from worker_entry.agent.tasks.attempt import AttemptRunner
    from worker_entry.agent.tasks.warm_forkserver import WarmForkserver
    from worker_entry.agent.tensorboard import EventFiles

TICK_S, IDLE_TICK_S = 0.05, 0.5
"""How often logs, ports and ongoing stops are polled: usually, and while tasks only train and no logs are streamed."""
FIRST_LEASE_S = 60.0


class Agent:
    """Owns the tasks of one node during a run. `run` returns when only a warm forkserver is left below it.

    Args:
        opening: the connection to the controller, and whether the controller may come back after it has broken.
        reattach_folder: the folder through which it comes back.
        loop_counter: shared with the guardian.
        kernel: the machine.
        forkserver: the forkserver of an earlier run, used for this run if possible.
        news: why there is no forkserver although one was kept.
        stay: whether this process stays after the run.
    """

    def __init__(
        self,
        opening: Opening,
        reattach_folder: Optional[ReattachFolder],
        loop_counter: LoopCounter,
        kernel: Kernel,
        *,
        forkserver: Optional[WarmForkserver] = None,
        news: str = "",
        stay: Optional[KeepWarm] = None,
    ) -> None:
        self._owned = contextlib.ExitStack()
        """Closed at the end in reverse order, even if a step fails."""
        self._kernel = kernel
        self._selector = self._owned.enter_context(kernel.make_selector())
        self._opening = opening
        self._outlives = opening.outlives and reattach_folder is not None
        self._lease = Lease(FIRST_LEASE_S, far=self._outlives, kernel=kernel)
        self._connection = Connection(self._selector, self._read, self._lose_connection, self._lease, kernel)
        self._owned.callback(lambda: self._connection.end(kept=self._keep_warm.kept is not None))
        self._reattach_folder = reattach_folder
        self._reattaching: Optional[Reattaching] = None
        self._loop_counter = loop_counter
        self._hello: Optional[orders.Hello] = None
        self._tcp_timeout = TcpTimeout(FIRST_LEASE_S)
        self._runner = LazyAttemptRunner(self._selector, self._send, kernel, forkserver, news)
        self._owned.callback(self._runner.close)
        self._keep_warm = stay or KeepWarm(until=0.0, allowed=False)
        self._copies: deque[FolderCopy] = deque()
        """The folders that are copied to this node, one after the other."""
        self._event_files: Optional[EventFiles] = None
        self._closing = self._garbled = self._controller_gone = self._failed = False
        self._asked_to_end = self._signalled = False  # set by a signal handler; the signal also wakes the loop
        self._guardian, self._step_due = os.getppid(), 0.0

    def run(self) -> int:
        """Runs the loop to its end; returns the exit status."""
        with self._owned:
            self._work()
        return 1 if self._failed else 0

    def _work(self) -> None:
        wake = self._kernel.wake_on_signals(self._ask_to_end, self._note_signal if is_managed() else None)
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        if self._reattach_folder is not None:
            on_call = self._accept_reattachment
            self._reattaching = Reattaching(
                self._reattach_folder, self._connection, self._runner.get, self._selector, on_call, self._kernel
            )
        self._connection.open(self._opening)
        while not self._done():
            self._loop_counter.advance(self._lease.end)
            self._connection.want_write()
            events = self._selector.select(self._tick())
            for key, _ in events:
                if key.fd in self._selector.get_map():  # not unregistered by an earlier callback
                    key.data()
            if [key.fd for key, _ in events] == [self._connection.output] and self._kernel.monotonic() < self._step_due:
                self._stream()  # there is room for another part of a file, many times per tick
            else:
                self._step()

    # --- one turn of the loop ---

    def _done(self) -> bool:
        return self._closing and not (self._runner.is_stopping or self._connection.pending or self._keep_warm.is_asked)

    def _tick(self) -> float:
        if self._copies and not self._copies[0].waits:
            return 0.0
        return TICK_S if self._runner.is_busy or (self._streaming and self._runner.has_tasks) else IDLE_TICK_S

    @property
    def _streaming(self) -> bool:
        return self._hello is not None and self._hello.stream_logs and not self._controller_gone

    def _step(self) -> None:
        self._step_due = self._kernel.monotonic() + TICK_S
        if self._reattaching is not None:
            self._reattaching.keep_folder()
        if self._asked_to_end or self._lease.overdue_s > 0:
            self._lose_controller()
        self._signalled = self._signalled and self._runner.get().note_signal()  # before the exits that follow from it
        if self._copies and not self._closing and self._hello is not None:
            copy = self._copies[0]
            copy.step()
            self._hello = replace(self._hello, cwd=copy.directory or self._hello.cwd)
            if copy.done:
                self._copies.popleft()
        if self._runner.exist or self._keep_warm.is_asked:
            self._step_runner(self._runner.get())

    def _step_runner(self, runner: AttemptRunner) -> None:
        self._tcp_timeout.poll(runner.pids)
        problem = runner.step(self._hello, self._kernel.monotonic())
        if problem is not None:
            self._break(problem)
        self._stream()
        can_deliver = self._connection.is_open or not self._closing
        runner.finish(self._connection.outbox, logs_first=self._streaming and can_deliver)
        for text, is_detail in runner.forkserver.take_news():
            self._send(Noted(f"imports {runner.forkserver.library} again: {text}", detail=is_detail))
        if self._keep_warm.is_asked and not runner.is_stopping:
            answer = self._keep_warm.answer(runner.forkserver, isolated=runner.is_isolated)
            if answer is not None:
                self._send(answer)

    def _read(self) -> None:
        try:
            messages = self._connection.read()
            if (
                messages is None and self._keep_warm.is_wanted
            ):  # the controller has sent its last order and waits for KeptWarm
                self._connection.stop_reading()
            elif messages is None:
                self._lose_connection()
            elif not self._garbled:  # after a protocol error, only the end of the stream counts
                for message, body in messages:
                    self._handle(message, body)
        except ProtocolError as error:
            self._garbled = True
            self._break(Problem("protocol-error", f"the agent was sent {error}"))

    def _stream(self) -> None:
        if not self._connection.is_open or not self._runner.exist:
            return
        if self._streaming:
            self._runner.get().stream_logs(self._connection)
        self._runner.get().stream_files(self._connection)

    def _accept_reattachment(self) -> None:
        assert self._reattaching is not None
        run_id = self._hello.run_id if self._hello else None
        message = self._reattaching.accept(run_id, gone=self._controller_gone)
        if isinstance(message, orders.Goodbye):
            self._ask_to_end()
        elif message is not None:
            for copy in self._copies:
                copy.resume()
            if self._runner.exist:
                self._runner.get().ask_input()

    def _send(self, message: Message, body: bytes = b"") -> None:
        if not self._controller_gone:
            self._connection.send(message, body)

    # --- orders from the controller ---

    def _handle(self, message: Message, body: bytes) -> None:
        if self._closing:  # nothing new is started, but the grace period can still be shortened
            if isinstance(message, orders.Stop):
                self._runner.get().stop(message.grace_s)
        elif isinstance(message, orders.Hello):
            self._greet(message)
        elif isinstance(message, orders.Early) and self._hello is None:
            self._runner.get().forkserver.begin(message.preload, os.getcwd(), "")
        elif self._hello is None:
            raise ProtocolError(f"{type(message).__name__} before Hello")
        elif isinstance(message, orders.Offer):
            from worker_entry.agent.files.copy import make_copy

            self._copies.append(make_copy(message, self._send))
            self._owned.callback(self._copies[-1].abandon)
        elif isinstance(message, orders.Piece):
            if self._copies:
                self._copies[0].take(message, body)
        elif isinstance(message, orders.Preload):
            order = replace(message, keep=message.keep or self._keep_warm.is_expected)
            self._runner.get().forkserver.begin(order, self._hello.cwd, self._hello.directory)
        elif isinstance(message, orders.Scalars):
            from worker_entry.agent.tensorboard import EventFiles

            self._event_files = self._event_files or EventFiles()
            problem = self._event_files.write(message)
            if problem is not None:
                self._send(Noted(f"TensorBoard does not show step times and goodput: {problem}"))
        elif isinstance(message, orders.Goodbye):
            self._closing = True
            if not self._failed:
                self._keep_warm.ask(message.keep_warm_s)
            if self._runner.has_tasks:
                self._runner.stop(GRACE_S)
        else:
            self._runner.get().handle(message, body, self._hello)

    def _greet(self, hello: orders.Hello) -> None:
        if hello.version != orders.VERSION:
            raise ProtocolError(f"version {hello.version} of the protocol; this agent speaks {orders.VERSION}")
        if self._hello is not None:
            raise ProtocolError("a second Hello")
        hello = replace(hello, directory=os.path.expanduser(hello.directory), cwd=os.path.expanduser(hello.cwd))
        if (problem := make_run_directory(hello.directory, is_ours=self._outlives)) is not None:
            self._break(problem)
            return
        if hello.isolated:
            self._runner.get().forkserver.end_early()  # a process keeps the network in which it was started
            from worker_entry.agent.network.outer import leave_network

            if (problem := leave_network(self._runner.get().leave_network)) is not None:
                self._break(problem)
                return
        self._hello = hello
        self._owned.callback(remove_empty_directory, hello.directory)
        self._lease.seconds = hello.lease_s
        self._tcp_timeout = TcpTimeout(hello.lease_s)
        self._loop_counter.limit_s = hello.lease_s
        if self._reattach_folder is not None:
            self._reattach_folder.note_run(hello.run_id)
        way_back = self._reattach_folder if self._outlives else None
        self._send(make_ready(way_back.path if way_back is not None else None, self._kernel.now()))

    # --- events other than orders ---

    def _ask_to_end(self) -> None:
        self._asked_to_end = True

    def _note_signal(self) -> None:
        """Notes a signal to the whole step, or that the guardian has died."""
        self._signalled = True
        self._asked_to_end = self._asked_to_end or os.getppid() != self._guardian

    def _lose_connection(self) -> None:
        """Handles a broken connection: with a reattach folder, the controller may come back until the lease expires."""
        if self._outlives and self._hello is not None:
            self._connection.close()
        else:
            self._lose_controller()

    def _lose_controller(self) -> None:
        """Stops everything, because the controller is gone or a signal asked this process to end."""
        if self._controller_gone:
            return
        self._controller_gone = True
        self._closing = True
        self._keep_warm.is_asked = False
        self._connection.close()
        # If this machine slept, the lease may have expired long ago and the tasks may run elsewhere by now: no grace.
        self._runner.stop(GRACE_S if self._lease.overdue_s < GRACE_S else 0.0)

    def _break(self, problem: Problem) -> None:
        self._failed = True
        self._closing = True
        self._runner.get().forget_finished()
        self._send(Broken(problem))
        self._runner.stop(GRACE_S)


def make_run_directory(path: str, *, is_ours: bool) -> Optional[Problem]:
    """Makes the folder of a run's files; returns why that fails. `is_ours`: the user has not chosen it."""
    try:
        make_private_directory(path)
    except OSError as error:
        hint = "make it writable" if is_ours else "choose another directory"
        return Problem("run-directory", f"{error.filename}: {error.strerror}", hint)
    return None


def make_ready(reattach_folder: Optional[str], now: float) -> Ready:
    """Returns the agent's first message; a controller reconnects through `reattach_folder`."""
    return Ready(
        version=VERSION,
        pid=os.getpid(),
        hostname=hardware.hostname(),
        python=sys.version.split()[0],
        executable=sys.executable,
        time=now,
        cores=hardware.cores(),
        gpus=hardware.gpus(),
        tensorflow=installed_version("tensorflow"),
        reattach_folder=reattach_folder,
        process_view=process_view(),
    )


class LazyAttemptRunner:
    """An agent's AttemptRunner, made only when an order needs it: most of the agent's modules are for running tasks.

    Args:
        selector: the agent's selector.
        send: sends a message to the controller.
        kernel: the machine.
        forkserver: the forkserver of an earlier run. With a forkserver or with `news`, the runner is made at once.
        news: why there is no forkserver although one was kept.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[Message], None],
        kernel: Kernel,
        forkserver: Optional[WarmForkserver],
        news: str,
    ) -> None:
        self._selector = selector
        self._send = send
        self._kernel = kernel
        self._owned = contextlib.ExitStack()
        self._made = self._make(forkserver, news) if forkserver is not None or news else None

    @property
    def exist(self) -> bool:
        return self._made is not None

    @property
    def is_stopping(self) -> bool:
        return self._made is not None and self._made.is_stopping

    @property
    def is_busy(self) -> bool:
        return self._made is not None and self._made.is_busy

    @property
    def has_tasks(self) -> bool:
        return self._made is not None and self._made.has_tasks

    def get(self) -> AttemptRunner:
        """The runner; makes it at the first call."""
        if self._made is None:
            self._made = self._make(None, "")
        return self._made

    def stop(self, grace_s: float) -> None:
        """Begins to stop the runner's processes, if there is a runner."""
        if self._made is not None:
            self._made.stop(grace_s)

    def close(self) -> None:
        """Releases the runner's resources."""
        self._owned.close()

    def _make(self, forkserver: Optional[WarmForkserver], news: str) -> AttemptRunner:
        from worker_entry.agent.tasks.attempt import AttemptRunner
        from worker_entry.agent.tasks.forkserver import ForkserverClient

        client = ForkserverClient(self._selector, forkserver, news)
        self._owned.callback(client.end)
        runner = AttemptRunner(self._selector, self._send, client, self._kernel)
        self._owned.callback(runner.close)
        return runner
