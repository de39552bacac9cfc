"""Sends the controller the files that tasks have written; the controller requests them piece by piece."""

from __future__ import annotations

import os
import selectors
import stat
from collections import deque
from collections.abc import Callable
from typing import Optional

from worker_entry.agent.connection.connection import OUTPUT_LIMIT, Connection
from worker_entry.agent.helpers.child_work import ChildWork
from worker_entry.protocol.collection import FileRead, FilesFound, FindFiles, ReadFile
from worker_entry.protocol.framing import encode
from worker_entry.protocol.messages import Message
from worker_entry.protocol.orders import Hello
from worker_entry.system.files import FilePart

ASKED_LIMIT = 1000
"""Unanswered requests that are kept; a controller has far fewer."""
CLOSED = -1


class FileSource:
    """Lists and reads files of one node. `pids` has the child processes that list files."""

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Message], None]) -> None:
        self._send = send
        self._work = ChildWork(selector)
        self.pids = self._work.pids
        self._asked: deque[tuple[ReadFile, str]] = deque(maxlen=ASKED_LIMIT)
        """Requests, and the folder in which the tasks ran then."""
        self._open: tuple[str, int] = ("", CLOSED)
        """The file that was read last, and its descriptor."""

    def find(self, order: FindFiles, hello: Hello) -> None:
        """Lists files; the answer is sent."""
        from worker_entry.agent.helpers.works import FIND_FILES

        failure = FilesFound(order.number, "", [], "the node could not list its files")
        self._work.begin_answer(FIND_FILES, encode(hello) + encode(order), self._send, failure)

    def ask(self, order: ReadFile, cwd: str) -> None:
        """Notes a request, which `stream` answers."""
        self._asked.append((order, cwd))

    def stream(self, connection: Connection) -> None:
        """Answers requests in turn, until the connection has enough to write; logs and heartbeats go first."""
        while self._asked and connection.is_open and connection.pending < OUTPUT_LIMIT:
            order, cwd = self._asked.popleft()
            facts = self._open_file(os.path.realpath(os.path.join(cwd, order.directory)), order.path)
            if facts is None:
                connection.send_part(FileRead(order.number, order.path, order.offset, 0, 0, 0), b"")
                continue
            length = max(min(order.size, facts.st_size - order.offset), 0)
            answer = FileRead(order.number, order.path, order.offset, length, facts.st_size, max(facts.st_mtime_ns, 0))
            connection.send_part(answer, FilePart(self._open[1], order.offset, length) if length else b"")
        if not self._asked:
            self._close_file()

    def close(self) -> None:
        """Drops all requests."""
        self._work.cancel()
        self._asked.clear()
        self._close_file()

    def _open_file(self, root: str, path: str) -> Optional[os.stat_result]:
        """Opens the file, if it is not open; returns its facts, None if it is gone or outside of the folder."""
        place = os.path.realpath(os.path.join(root, path))
        try:
            if self._open[0] != place:
                self._close_file()
                if not place.startswith(os.path.join(root, "")):
                    return None
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._open = place, os.open(place, flags)
            facts = os.stat(place)
            if stat.S_ISREG(facts.st_mode) and os.path.samestat(facts, os.fstat(self._open[1])):
                return facts
        except OSError:
            pass
        self._close_file()
        return None

    def _close_file(self) -> None:
        if self._open[1] != CLOSED:
            os.close(self._open[1])
        self._open = "", CLOSED
