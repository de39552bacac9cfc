"""Starts another machine's agent over SSH: one connection, one command, and frames over its stdin and stdout.

The connection follows the user's own ssh configuration (`config`). Host keys are checked as by OpenSSH in batch mode
(`known_hosts`), before anything is sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import paramiko

from launcher.transports.base import Deliver, LinkBroken, LinkError, LinkNote, LogSink, Resumption
from launcher.transports.payload import make_payload
from launcher.transports.resumable_link import ResumableLink
from launcher.transports.ssh.config import SshTarget
from launcher.transports.ssh.connect import AUTH_S, Connection, connect
from launcher.transports.ssh.raw_connection import place_of
from launcher.transports.streams import ask
from worker_entry.protocol.messages import Cleaned, Message
from worker_entry.protocol.orders import VERSION, Clean
from worker_entry.protocol.values import TaskExit

BANNER_S = 60.0
END_WAIT_S = 15.0
"""How long an agent may take to stop: its grace for the tasks, and the round trip."""
LAST_TRY_S = 5.0
"""How long one more connection may take when a node's agent is silent."""
END_BY_GUARDIAN_S = 25.0
"""How long that connection may take to clean the node."""
ATTEMPTS = 5
"""Connections tried if sshd drops them because it is busy (MaxStartups)."""

_connecting = threading.BoundedSemaphore(32)


class SshTransport:
    """A machine with sshd and Python. `python` is its interpreter, found on its PATH.

    With `accept_new`, the key of an unknown host is trusted and remembered.
    """

    shares_files = False

    def __init__(self, target: SshTarget, python: str, *, accept_new: bool = False) -> None:
        self._target = target
        self._python = python
        self._accept_new = accept_new

    def connect(
        self, node: str, deliver: Deliver, mirror: LogSink, lease_s: float, resumption: Resumption | None = None
    ) -> SshLink:
        return SshLink(
            node=node,
            target=self._target,
            python=self._python,
            deliver=deliver,
            mirror=mirror,
            lease_s=lease_s,
            accept_new=self._accept_new,
            resumption=resumption,
        )


class SshLink:
    """The link to a node, from the first attempt to connect; its own thread makes the connections."""

    def __init__(
        self,
        *,
        node: str,
        target: SshTarget,
        python: str,
        deliver: Deliver,
        mirror: LogSink,
        lease_s: float,
        accept_new: bool,
        resumption: Resumption | None = None,
    ) -> None:
        self._target = target
        self._python = python
        self._accept_new = accept_new
        self._note = lambda text: deliver(node, LinkNote(text))
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._began = resumption is not None
        self._frames = ResumableLink(
            node,
            lambda: self._open("node", BANNER_S, ATTEMPTS),
            deliver,
            mirror,
            lease_s=lease_s,
            reopen=lambda within_s: self._open("attach", within_s, 1),
            resumption=resumption,
        )

    @property
    def last_heard(self) -> float:
        return self._frames.last_heard

    @property
    def clock_offset_s(self) -> float:
        return self._frames.clock_offset_s

    def send(self, message: Message, body: bytes = b"") -> None:
        self._frames.send(message, body)

    def confirm(self, frame: int) -> None:
        self._frames.confirm(frame)

    def drop_if_silent(self, limit_s: float) -> None:
        self._frames.drop_if_silent(limit_s)

    def abandon(self) -> None:
        self._frames.give_up()

    def close(self) -> int | None:
        with self._lock:
            self._closing.set()
            if not self._began:
                return 0  # nothing was started on the node
        if not self._frames.began:
            self._frames.give_up()  # an agent that still starts finds its stdin closed, and ends
            return 0
        self._frames.finish()
        if not self._frames.join(END_WAIT_S):
            self._frames.give_up()
        if self._frames.taken_over:
            return None
        return 0 if self._frames.ended or self._end_by_guardian() else None

    def _end_by_guardian(self) -> bool:
        """Has the guardian stop an unreachable agent, over a new connection; returns whether nothing is left."""
        if self._frames.reattach_folder is None:
            return False
        try:
            stream = open_stream(self._target, self._python, "clean", within_s=LAST_TRY_S, attempts=1)
            order = Clean(VERSION, [], self._frames.reattach_folder, self._frames.generation)
            answer = ask(stream, order, END_BY_GUARDIAN_S)
        except LinkError:
            return False
        return isinstance(answer, Cleaned) and not answer.left

    def _open(self, verb: str, within_s: float, attempts: int) -> ChannelStream:
        return open_stream(
            self._target,
            self._python,
            verb,
            within_s=within_s,
            attempts=attempts,
            cancelled=self._closing,
            begin=self._begin,
            accept_new=self._note if self._accept_new else None,
        )

    def _begin(self) -> None:
        """Notes that something may be started on the node, which `close` has to wait for."""
        with self._lock:
            if self._closing.is_set() and not self._began:
                raise LinkError("the run ended before the connection was established")
            self._began = True


class ChannelStream:
    """One connection with its one command."""

    def __init__(self, connection: Connection, channel: paramiko.Channel) -> None:
        self._connection = connection
        self._channel = channel

    def read(self, size: int, timeout_s: float) -> bytes:
        self._channel.settimeout(timeout_s)
        try:
            data = self._channel.recv(size)
        except TimeoutError:
            raise LinkBroken(f"no data for {timeout_s:.0f} s") from None
        # The command ends with the guardian, which ends once nothing is left below it. A command that ended has an
        # exit status, a broken connection has none.
        if not data and not (self._channel.status_event.wait(END_WAIT_S) and self._channel.exit_status >= 0):
            raise LinkBroken("the connection broke")
        return data

    def write(self, data: bytes) -> None:
        with _broken_as_os_error():
            self._channel.sendall(data)

    def finish(self) -> None:
        with _broken_as_os_error():
            self._channel.shutdown_write()

    def abandon(self) -> None:
        self._connection.close()

    def how_ended(self) -> str:
        self.abandon()
        status = self._channel.exit_status
        return f"the agent was ended by {TaskExit(signal=status - 128)}" if status > 128 else "the agent ended"

    def exit_status(self) -> int | None:
        return self._channel.exit_status


@contextlib.contextmanager
def _broken_as_os_error() -> Iterator[None]:
    try:
        yield
    except (EOFError, paramiko.SSHException) as error:  # paramiko's errors for a lost connection
        raise OSError(f"the connection broke: {error}") from None


def open_stream(
    target: SshTarget,
    python: str,
    verb: str,
    *,
    within_s: float = BANNER_S,
    attempts: int = ATTEMPTS,
    cancelled: threading.Event | None = None,
    begin: Callable[[], None] = lambda: None,
    accept_new: Callable[[str], None] | None = None,
) -> ChannelStream:
    """Starts `verb` of worker_entry on a machine.

    Args:
        target: the machine.
        python: the machine's interpreter.
        verb: a verb of `worker_entry.__main__`.
        within_s: the time limit of each step.
        attempts: how often a busy sshd is tried.
        cancelled: set when the stream is no longer needed.
        begin: called once the connection is established, before anything is started; may raise LinkError.
        accept_new: as for `connect`.

    Raises:
        LinkError: the machine cannot be reached, or runs no command.
    """
    payload = make_payload(verb)
    with _connecting:
        connection = connect(
            target,
            cancelled=cancelled or threading.Event(),
            within_s=within_s,
            attempts=attempts,
            accept_new=accept_new,
        )
        try:
            begin()
            channel = connection.transport.open_session(timeout=min(AUTH_S, within_s))
            channel.set_combine_stderr(True)
            channel.exec_command(payload.command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            connection.close()
            raise LinkError(
                f"{place_of(target)} runs no command: {str(error) or 'the connection was closed'}"
            ) from None
        except LinkError:
            connection.close()
            raise
    stream = ChannelStream(connection, channel)
    with contextlib.suppress(OSError):  # the other side may have sent its reason, which the reader finds
        stream.write(payload.first_bytes(python))
    return stream
