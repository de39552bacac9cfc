"""Passes the controller's stdin to the stdin of a task, which is a pipe.

The controller keeps all input: the agent requests the next part when the task has read the last one, and a restarted
task reads everything again. A task that reads nothing costs one part.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable

from worker_entry.protocol.messages import AskInput, Message
from worker_entry.protocol.orders import Input


class TaskInput:
    """The pipe of one task.

    Args:
        task: the task's name.
        selector: the agent's.
        send: sends a message to the controller.
    """

    def __init__(self, task: str, selector: selectors.BaseSelector, send: Callable[[Message], None]) -> None:
        self._task = task
        self._selector = selector
        self._send = send
        self.reader, self._writer = os.pipe()
        """`reader`: for the task; closed by `begin`."""
        os.set_blocking(self._writer, False)
        self._offset = 0
        """How many bytes have arrived."""
        self._left = memoryview(b"")
        self._is_last = False

    def begin(self) -> None:
        """Called when the task has been started."""
        os.close(self.reader)
        self.reader = -1
        self.ask()

    def ask(self) -> None:
        """Asks for the next part, unless one is being written; again over a new connection."""
        if self._writer >= 0 and not self._left and not self._is_last:
            self._send(AskInput(self._task, self._offset))

    def take(self, part: Input, body: bytes) -> None:
        """Accepts a part that has arrived; ignores a part that was not requested, or arrives twice."""
        if self._writer < 0 or part.offset != self._offset or self._left or self._is_last:
            return
        self._offset += len(body)
        self._left, self._is_last = memoryview(body), part.last
        if self._left:
            self._selector.register(self._writer, selectors.EVENT_WRITE, self._write)
        elif self._is_last:
            self.close()

    def close(self) -> None:
        """Closes the task's stdin."""
        if self._writer >= 0:
            with contextlib.suppress(KeyError):  # nothing was being written
                self._selector.unregister(self._writer)
            os.close(self._writer)
        if self.reader >= 0:
            os.close(self.reader)
        self.reader = self._writer = -1

    def _write(self) -> None:
        try:
            written = os.write(self._writer, self._left)
        except BlockingIOError:
            return
        except OSError:  # the task has closed its stdin, or has ended
            self.close()
            return
        self._left = self._left[written:]
        if not self._left:
            self._selector.unregister(self._writer)
            if self._is_last:
                self.close()
            else:
                self.ask()
