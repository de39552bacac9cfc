"""An agent's connection to its controller, which may break and be replaced."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Optional, Protocol, Union

from worker_entry.agent.connection.lease import Lease
from worker_entry.agent.connection.reattach_calls import (
    KEPT,
    NOT_NEEDED,
    REFUSED,
    TAKEN,
    Reattachment,
    receive_call,
    release,
)
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Attached, Log, Message
from worker_entry.protocol.orders import TAKEN_OVER, Attach, Beat, Goodbye
from worker_entry.protocol.resend_buffer import ResendBuffer, is_counted
from worker_entry.protocol.values import Problem
from worker_entry.system.agent_kernel import Kernel
from worker_entry.system.files import FilePart

OUTPUT_LIMIT = 256 << 10
"""Unsent bytes above which logs wait on disk."""
WRITTEN_AT_ONCE = 16
"""Buffers per write; headers and bodies are not copied together."""
SET_PIPE_SIZE = 1031
"""Linux's F_SETPIPE_SZ, which `fcntl` has from Python 3.10 on."""
LOOK_S = 1.0
"""How often an agent checks that its folder is there."""


@dataclass(frozen=True)
class Opening:
    """A run's first connection.

    `call`: the socket to the process that waits for the run's end in place of the agent; None: no process waits.
    `outlives`: whether the agent waits for its controller to come back when the connection breaks.
    """

    stdin: int
    stdout: int
    call: Optional[socket.socket] = None
    outlives: bool = False

    def accept(self, reattach_folder: str) -> None:
        """Tells the waiting process that the agent serves the run."""
        if self.call is not None:
            with contextlib.suppress(OSError):  # the process is gone, and so is the connection
                self.call.sendall(TAKEN + reattach_folder.encode(errors="surrogateescape") + b"\n")

    def refuse(self, reason: str) -> None:
        """Gives the connection back to the waiting process."""
        os.close(self.stdin)
        os.close(self.stdout)
        if self.call is not None:
            with contextlib.suppress(OSError):
                self.call.sendall(REFUSED + reason.encode() + b"\n")
            self.call.close()


class Connection:
    """Sends and receives frames over two descriptors; keeps counted frames until the controller has confirmed them.

    Calls `on_input` when there is something to `read`, and `on_break` when the controller no longer reads.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        on_input: Callable[[], None],
        on_break: Callable[[], None],
        lease: Lease,
        kernel: Kernel,
    ) -> None:
        self._lease = lease
        self._kernel = kernel
        self._unanswered: Optional[Beat] = None
        self.outbox = ResendBuffer()
        self.is_open = False
        self._selector = selector
        self._on_input = on_input
        self._on_break = on_break
        self._stdin = -1
        self.output = -1
        """The descriptor that is written to; -1 without a connection."""
        self._call: Optional[socket.socket] = None
        self._decoder = Decoder()
        self._output: deque[Union[bytes, memoryview, FilePart]] = deque()
        self.pending = 0
        """Bytes that have not been written yet."""

    def open(self, opening: Opening) -> None:
        """Uses the descriptors; from here on, 0 and 1 are /dev/null."""
        descriptors = os.dup(opening.stdin), os.dup(opening.stdout)
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, opening.stdin)
        os.dup2(devnull, opening.stdout)
        for descriptor in {devnull, opening.stdin, opening.stdout} - {0, 1}:
            os.close(descriptor)
        self._call = opening.call
        self._use(*descriptors)
        self._put(MARKER)

    def replace(self, reattachment: Reattachment, received: int) -> None:
        """Switches to a new connection and sends again all but the first `received` frames.

        Received frames are still kept: a controller that is killed before it has handled a frame needs it again.

        Raises:
            ProtocolError: some of these frames are gone; the old connection stays in use.
        """
        missing = self.outbox.after(received)
        self.close()
        self._unanswered = None
        self._call = reattachment.call
        self._use(reattachment.stdin, reattachment.stdout)
        self._put(MARKER)
        self.send(Attached(self.outbox.received, received + 1))
        for frame in missing:
            self._put(frame)

    def _use(self, stdin: int, stdout: int) -> None:
        for descriptor in (stdin, stdout):
            os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # not a pipe, or no more memory for pipes
            fcntl.fcntl(stdout, SET_PIPE_SIZE, OUTPUT_LIMIT)  # a turn of the loop takes longer than a write of 64 KiB
        self._stdin, self.output = stdin, stdout
        self._decoder = Decoder()
        self.is_open = True
        self._selector.register(stdin, selectors.EVENT_READ, self._on_input)

    def stop_reading(self) -> None:
        """Called at the end of the stream, if the other side still reads."""
        self._selector.unregister(self._stdin)

    def close(self) -> None:
        """Closes the connection; counted frames are kept for the next one."""
        self._close(NOT_NEEDED)

    def end(self, *, kept: bool = False) -> None:
        """Closes the connection because the run ends: a waiting process then waits for the guardian's exit status.

        With `kept`, the agent stays for another run, and that process ends.
        """
        self._close(KEPT if kept else b"")

    def _close(self, word: bytes) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if self._stdin in self._selector.get_map():
            self._selector.unregister(self._stdin)
        self._stop_writing()
        for data in self._output:
            if isinstance(data, FilePart):
                data.close()
        self._output.clear()
        self.pending = 0
        os.close(self._stdin)
        os.close(self.output)
        self.output = -1
        if self._call is not None:
            release(self._call, word)
            self._call = None

    def send(self, message: Message, body: bytes = b"") -> None:
        header = encode(message)
        if is_counted(message):
            self.outbox.add(header + body)
        if self.is_open:
            self._put(header)
            if body:
                self._put(body)

    def send_part(self, header: Union[Log, FileRead], data: Union[bytes, FilePart]) -> None:
        """Sends a part of a file over the open connection; closes `data` when it is sent."""
        self._put(encode(header))
        if data:
            self._put(data)

    def _put(self, data: Union[bytes, FilePart]) -> None:
        self._output.append(data)
        self.pending += len(data)

    def read(self) -> Optional[Iterator[tuple[Message, bytes]]]:
        """The messages that have arrived, with their bodies; None at the end of the stream.

        Raises:
            ProtocolError: the bytes are not a frame.
        """
        try:
            data = os.read(self._stdin, 1 << 16)
        except BlockingIOError:
            return iter(())
        except OSError:  # a socket that was reset
            return None
        if not data:
            return None
        return self._parse(data)

    def _parse(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        for message, body in self._decoder.feed(data):
            if is_counted(message):
                self.outbox.received += 1
            if isinstance(message, Beat):
                self.outbox.confirm(message.received)
                self._lease.confirm(message.stamp)
                self._unanswered = message
                self._answer()
            else:
                yield message, body

    def _answer(self) -> None:
        """Answers the last beat when there is room: the controller may not be reading."""
        if self._unanswered is not None and self.pending < OUTPUT_LIMIT:
            beat, self._unanswered = self._unanswered, None
            self.send(Beat(self._kernel.now(), self.outbox.received, beat.time, self._lease.stamp()))

    def want_write(self) -> None:
        """Registers for writing if there is something to write."""
        if self._output and self.output not in self._selector.get_map():
            self._selector.register(self.output, selectors.EVENT_WRITE, self._write)

    def _write(self) -> None:
        try:
            while self._output:
                self._write_some()
        except BlockingIOError:
            pass
        except OSError:  # the other end is closed
            self._on_break()
            return
        self._answer()
        if not self._output:
            self._stop_writing()

    def _write_some(self) -> None:
        first = self._output[0]
        if isinstance(first, FilePart):
            self.pending -= first.send(self.output)
            if not first:
                self._output.popleft()
                first.close()
            return
        buffers: list[Union[bytes, memoryview]] = []
        for data in islice(self._output, WRITTEN_AT_ONCE):
            if isinstance(data, FilePart):
                break
            buffers.append(data)
        written = os.writev(self.output, buffers)
        self.pending -= written
        for buffer in buffers:
            if written < len(buffer):
                self._output[0] = memoryview(buffer)[written:]
                break
            self._output.popleft()
            written -= len(buffer)

    def _stop_writing(self) -> None:
        if self.output in self._selector.get_map():
            self._selector.unregister(self.output)


class Resumable(Protocol):
    """The state that a new connection resumes: the agent's attempts."""

    def resume(self, received: int, outbox: ResendBuffer) -> None: ...

    def rewind(self, attach: Attach) -> None: ...

    def report_again(self) -> None: ...


class Reattaching:
    """The agent's side of its reattach folder: opens its socket, and has `on_call` called for each caller."""

    def __init__(
        self,
        folder: ReattachFolder,
        connection: Connection,
        find_attempts: Callable[[], Resumable],
        selector: selectors.BaseSelector,
        on_call: Callable[[], None],
        kernel: Kernel,
    ) -> None:
        self._kernel = kernel
        folder.listen()
        selector.register(folder, selectors.EVENT_READ, on_call)
        self._selector = selector
        self._on_call = on_call
        self._folder = folder
        self._connection = connection
        self._find_attempts = find_attempts
        self._generation = 0
        """The controller's generation."""
        self._look_due = 0.0

    def keep_folder(self) -> None:
        """Makes the folder again if something has removed it, for example a cleaner of /dev/shm."""
        now = self._kernel.monotonic()
        if now < self._look_due:
            return
        self._look_due = now + LOOK_S
        if not self._folder.is_intact():
            self._selector.unregister(self._folder)
            with contextlib.suppress(OSError):  # tried again
                self._folder.ensure()
            self._selector.register(self._folder, selectors.EVENT_READ, self._on_call)

    def accept(self, run_id: Optional[str], *, gone: bool) -> Union[Attach, Goodbye, None]:
        """Takes the connection that waits; returns its Attach, Goodbye if the agent is asked to end, or None.

        Args:
            run_id: the agent's run; None before Hello.
            gone: whether the agent has given up its controller.
        """
        reattachment = receive_call(self._folder.accept())
        if not isinstance(reattachment, Reattachment):
            return reattachment
        if gone or not reattachment.take():
            reattachment.leave()
            return None
        attach, outbox = reattachment.attach, self._connection.outbox
        if attach.generation < self._generation:
            reattachment.refuse(Problem(TAKEN_OVER, "another controller has taken over the run"))
            return None
        try:
            self._check(attach, run_id)
            # A controller does not record every frame that it handles, but it has handled all that it confirmed.
            received = max(attach.received, outbox.confirmed) if attach.takeover else attach.received
            attempts = self._find_attempts()
            attempts.resume(received, outbox)
            self._connection.replace(reattachment, received)
        except ProtocolError as error:
            reattachment.refuse(Problem("protocol-error", f"the agent was sent {error}"))
            return None
        attempts.rewind(attach)
        if attach.takeover:
            self._generation = attach.generation
            self._folder.note_generation(attach.generation)
            attempts.report_again()
        return attach

    def _check(self, attach: Attach, run_id: Optional[str]) -> None:
        """Raises ProtocolError if the sender is not the controller of this agent, or its successor."""
        if run_id is None or attach.run_id not in ("", run_id):
            raise ProtocolError("an Attach to another run")
        # A takeover of the same generation comes again if its answer was lost.
        if attach.generation == 0 if attach.takeover else attach.generation != self._generation:
            raise ProtocolError(f"an Attach of generation {attach.generation} after {self._generation}")
