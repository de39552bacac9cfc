"""A child process of the agent that runs a verb of `worker_entry`, reads orders from stdin, and prints answers."""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from worker_entry.protocol.file_names import PACKAGE
from worker_entry.system import processes

LINE_LIMIT = 4 << 20
"""Bytes of the longest line that is kept whole."""


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
        self._output: Optional[int] = None
        self._input: Optional[int] = None
        self._rest = self._last = b""

    @property
    def is_running(self) -> bool:
        """Whether the process may still print something."""
        return self._output is not None

    def start(self, words: Sequence[str], env: Optional[Mapping[str, str]] = None) -> None:
        """Starts the process; `env`: its environment, by default the agent's.

        Raises:
            OSError: it cannot be started.
            ValueError: the environment has a null byte.
        """
        output, theirs = os.pipe()
        orders, self._input = os.pipe()
        self._output, self._rest, self._last = output, b"", b""
        self.selector.register(output, selectors.EVENT_READ, self._read)
        command, environ = [sys.executable, PACKAGE, *words], dict(os.environ if env is None else env)
        try:
            self.pids.add(processes.spawn(command, env=environ, cwd=os.sep, output=theirs, stdin=orders))
        except (OSError, ValueError):
            self.forget()
            raise
        finally:
            os.close(theirs)
            os.close(orders)

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Writes an order, unless the process has ended; closes the process's stdin after the `last` order."""
        if self._input is None:
            return
        with contextlib.suppress(OSError), open(self._input, "wb", closefd=False) as stream:
            stream.write(data)
        if last:
            os.close(self._input)
            self._input = None

    def end(self) -> None:
        """Kills the process and waits until it is gone."""
        processes.end_children(self.pids)
        self.forget()

    def forget(self) -> None:
        """Reads no more of what the process prints."""
        if self._output is not None:
            self.selector.unregister(self._output)
            os.close(self._output)
        if self._input is not None:
            os.close(self._input)
        self._output = self._input = None

    def _read(self) -> None:
        assert self._output is not None
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self._output, 1 << 16)
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
