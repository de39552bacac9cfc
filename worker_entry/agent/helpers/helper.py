"""A child process of the agent that runs a verb of `worker_entry`, reads orders from stdin, and prints answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from worker_entry.protocol.file_names import PACKAGE
from worker_entry.system import processes

LINE_LIMIT = 4 << 20
"""Bytes of the longest line that is kept whole."""
WRITE_S = 20.0
"""How long a process may take to read an order that does not fit into the socket's buffer."""


class HelperProcess:
    """At most one process at a time. `pids` contains it, so that others can exempt it from a stop of the tasks.

    Args:
        selector: the agent's.
        take: called with each line that the process prints, also with what libraries print.
        ended: called with the last line that is not blank, once the process has closed its output; not after `end`.
    """

    def __init__(
        self, selector: selectors.BaseSelector, take: Callable[[bytes], None], ended: Callable[[bytes], None]
    ) -> None:
        self.pids: set[int] = set()
        self.selector = selector
        self._take = take
        self._ended = ended
        self._channel: Optional[socket.socket] = None
        """The process's stdin, stdout and stderr."""
        self._rest = self._last = b""

    @property
    def is_running(self) -> bool:
        """Whether the process may still print something."""
        return self._channel is not None

    def start(self, words: Sequence[str], env: Optional[Mapping[str, str]] = None) -> None:
        """Starts the process; `env`: its environment, by default the agent's.

        Raises:
            OSError: it cannot be started.
            ValueError: the environment has a null byte.
        """
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(WRITE_S)
        self._rest = self._last = b""
        self.selector.register(self._channel, selectors.EVENT_READ, self._read)
        command, environ = [sys.executable, PACKAGE, *words], dict(os.environ if env is None else env)
        try:
            with theirs:
                end = theirs.fileno()
                self.pids.add(processes.spawn(command, env=environ, cwd=os.sep, output=end, stdin=end))
        except (OSError, ValueError):
            self.forget()
            raise

    def write(self, data: bytes, *descriptors: int, last: bool = False) -> None:
        """Writes an order, unless the process has ended; after the `last` one, its stdin is at its end.

        `descriptors` are sent with the first byte.
        """
        if self._channel is None:
            return
        with contextlib.suppress(OSError):
            if descriptors:
                socket.send_fds(self._channel, [data[:1]], descriptors)
                data = data[1:]
            self._channel.sendall(data)
            if last:
                self._channel.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Kills the process and waits until it is gone."""
        processes.end_children(self.pids)
        self.forget()

    def forget(self) -> None:
        """Reads no more of what the process prints."""
        if self._channel is not None:
            self.selector.unregister(self._channel)
            self._channel.close()
            self._channel = None

    def _read(self) -> None:
        assert self._channel is not None
        data = b""
        with contextlib.suppress(OSError):
            data = self._channel.recv(1 << 16)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-LINE_LIMIT:]
        if not data:
            lines.append(self._rest)
        for line in lines:
            if line.strip():
                self._last = line
                self._take(line)
            if not self.is_running:  # `take` has ended the process
                return
        if not data:
            self.forget()
            self._ended(self._last)
