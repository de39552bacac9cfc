"""Runs work that may block, on a name server or a network file system, in child processes: the agent must not block.

The children belong to the agent's process tree and are stopped with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable
from typing import Optional

from worker_entry.agent.helpers.works import perform
from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.protocol.framing import Decoder, ProtocolError
from worker_entry.protocol.messages import Message
from worker_entry.system import processes


class ChildWork:
    """Child processes and their pending answers."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._readers: set[int] = set()
        self.pids: set[int] = set()
        """The children in this process's network."""

    def begin(
        self, work: str, data: bytes, done: Callable[[bytes], None], outer: Optional[OuterNetwork] = None
    ) -> None:
        """Does the work in a child; `done` gets its answer, which is empty or incomplete if the child has failed.

        Args:
            work: the name of the work.
            data: its input; see `helpers.works`.
            done: called with the answer, unless the work is cancelled.
            outer: the network in which the work is done, if not this process's.
        """
        reader, writer = os.pipe()
        if outer is None:
            self.pids.add(fork_work(lambda: perform(work, data), writer))
        else:
            with contextlib.suppress(OSError):  # the outer process is gone: there is no answer
                outer.begin_work(work, data, writer)
        os.close(writer)
        answer = bytearray()

        def read_answer() -> None:
            data = os.read(reader, 1 << 16)
            answer.extend(data)
            if data:
                return
            self._readers.discard(reader)
            self._selector.unregister(reader)
            os.close(reader)
            done(bytes(answer))

        self._readers.add(reader)
        self._selector.register(reader, selectors.EVENT_READ, read_answer)

    def begin_answer(
        self,
        work: str,
        data: bytes,
        send: Callable[[Message], None],
        failure: Message,
        outer: Optional[OuterNetwork] = None,
    ) -> None:
        """Does work whose answer is a message, and sends the message, or `failure` if the child has failed."""

        def pass_on(answer: bytes) -> None:
            message = failure
            with contextlib.suppress(ProtocolError, ValueError):
                [(message, _)] = Decoder().feed(answer)
            send(message)

        self.begin(work, data, pass_on, outer)

    def cancel(self) -> None:
        """Drops the answers that are awaited; the caller stops the processes with the rest of the tree."""
        for reader in self._readers:
            self._selector.unregister(reader)
            os.close(reader)
        self._readers.clear()


def fork_work(work: Callable[[], bytes], writer: int, *needed: int) -> int:
    """Forks a child that does the work, writes its answer and exits; this process must have one thread.

    Args:
        work: returns the answer.
        writer: the descriptor to which the answer is written.
        needed: other descriptors that the work needs.

    Returns:
        The child's pid.
    """
    if (pid := os.fork()) != 0:
        return pid
    status = 1
    try:
        processes.become_independent((writer, *needed))
        with os.fdopen(writer, "wb") as stream:
            stream.write(work())
        status = 0
    finally:
        os._exit(status)
