"""Connects over SSH: paramiko's connection and one command.

The connection follows the user's own ssh configuration (`config`). Host keys are checked as by OpenSSH in batch mode
(`known_hosts`), before anything is sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import paramiko

from launcher.transports.base import LinkBroken, LinkError
from launcher.transports.connector import Opening
from launcher.transports.payload import Payload
from launcher.transports.ssh.config import SshTarget
from launcher.transports.ssh.connect import AUTH_S, Connection, connect
from launcher.transports.ssh.raw_connection import place_of
from worker_entry.protocol.values import TaskExit

STATUS_S = 15.0
"""How long the exit status of an ended command may take: sshd sends it unasked, before it closes the connection."""

_connecting = threading.BoundedSemaphore(32)


class ParamikoConnector:
    """A machine with sshd. With `accept_new`, the key of an unknown host is trusted and remembered."""

    def __init__(self, target: SshTarget, *, accept_new: bool = False) -> None:
        self._target = target
        self._accept_new = accept_new

    @property
    def address(self) -> str:
        return self._target.hostname

    def open(self, payload: Payload, python: str, opening: Opening) -> ChannelStream:
        with _connecting:
            connection = connect(
                self._target,
                cancelled=opening.cancelled,
                within_s=opening.within_s,
                attempts=opening.attempts,
                accept_new=opening.note if self._accept_new else None,
            )
            try:
                opening.begin()
                channel = connection.transport.open_session(timeout=min(AUTH_S, opening.within_s))
                channel.set_combine_stderr(True)
                channel.exec_command(payload.command)
            except (paramiko.SSHException, EOFError, OSError) as error:
                connection.close()
                raise LinkError(
                    f"{place_of(self._target)} runs no command: {str(error) or 'the connection was closed'}"
                ) from None
            except LinkError:
                connection.close()
                raise
        stream = ChannelStream(connection, channel, payload.archive)
        with contextlib.suppress(OSError):  # the other side may have sent its reason, which the reader finds
            stream.write(payload.opening(python))
        return stream


class ChannelStream:
    """A connection that runs one command."""

    def __init__(self, connection: Connection, channel: paramiko.Channel, archive: bytes) -> None:
        self.archive = archive
        self._connection = connection
        self._channel = channel

    def read(self, size: int, timeout_s: float) -> bytes:
        self._channel.settimeout(timeout_s)
        try:
            data = self._channel.recv(size)
        except TimeoutError:
            raise LinkBroken(f"no data for {timeout_s:.0f} s") from None
        except (EOFError, OSError, paramiko.SSHException):  # it also tells the other side that there is room
            raise LinkBroken("the connection broke") from None
        # The command ends with the guardian, which ends once nothing is left below it. A command that ended has an
        # exit status, a broken connection has none.
        if not data and not (self._channel.status_event.wait(STATUS_S) and self._channel.exit_status >= 0):
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
