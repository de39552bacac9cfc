"""Fetches the files of one folder of a node, piece by piece, over the run's own link."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launcher.controller.collect.folder import CannotFetchError, CollectedFolder, publish
from worker_entry.protocol.collection import FileRead, FilesFound, FindFiles, FoundFile, ReadFile

PIECE = 256 << 10
"""How many bytes one request asks for; the node's heartbeats wait while so many are sent."""
ASKED_AT_ONCE = 8
ROUNDS = 5
"""How often files that change while they are read are read again."""

Order = FindFiles | ReadFile


class FolderFetch:
    """One fetch. `begin` and `take` return the next orders to the node.

    Files that have changed while they were read are read again. With `is_whole`, the fetch ends only when a second
    listing finds the folder as it was read: then all files belong together.

    Args:
        node: the node.
        order: finds the files.
        folder: stores the files.
        admit: returns the wanted ones of the listed files; raises CannotFetchError.
        is_whole: see above.
    """

    def __init__(
        self,
        node: str,
        order: FindFiles,
        folder: CollectedFolder,
        admit: Callable[[FolderFetch, Sequence[FoundFile]], Sequence[FoundFile]],
        *,
        is_whole: bool = False,
    ) -> None:
        self.node = node
        self.directory = ""
        """The folder on the node, once it is known."""
        self.found: Sequence[FoundFile] = ()
        """The files, as last listed."""
        self.fetched_files = self.fetched_bytes = 0
        """Files and bytes received so far."""
        self.left_bytes = 0
        """Bytes still to be received."""
        self.problem = ""
        """Why the fetch has ended without all files."""
        self.is_over = False
        self.is_whole = is_whole
        self._order = order
        self._folder = folder
        self._admit = admit
        self._asked: deque[Order] = deque()
        self._next: Iterator[ReadFile] = iter(())
        self._versions: dict[str, FoundFile] = {}
        self._changed: set[str] = set()
        self._rounds = 0
        self._failure = ""
        """Why bytes could not be written; set by the link's thread."""

    @property
    def number(self) -> int:
        return self._order.number

    def begin(self) -> list[Order]:
        """Begins the fetch."""
        return self._ask([self._order])

    def resume(self) -> list[Order]:
        """The orders to repeat over a new connection, because the answers may have been lost with the old one."""
        return [order for order in self._asked if isinstance(order, ReadFile)]

    def write(self, part: FileRead, data: bytes) -> None:
        """Writes a piece; called from the link's thread."""
        try:
            version = self._versions.get(part.path)
            if version is not None and (part.size, part.changed) == (version.size, version.changed):
                self._folder.write(part.path, part.offset, data)
        except OSError as error:
            self._failure = str(error.strerror)

    def publish(self, place: Path) -> None:
        """Replaces the folder at `place` with this one, which is complete; raises OSError."""
        self._folder.keep_only(self.found)
        publish(self._folder.root, place)

    def end(self, problem: str) -> None:
        """Ends the fetch."""
        self.is_over, self.problem = True, problem
        self._asked.clear()
        self._folder.close()

    def take(self, answer: FilesFound | FileRead) -> list[Order]:
        """Handles an answer of the node; `write` has already written its bytes."""
        return self._take_found(answer) if isinstance(answer, FilesFound) else self._take_read(answer)

    def _take_found(self, answer: FilesFound) -> list[Order]:
        if self.is_over or self._asked != deque([self._order]):
            return []
        self._asked.clear()
        self.directory = answer.directory
        before = self.found if self._rounds else None
        if answer.problem:
            self.end(answer.problem)
            return []
        try:
            self.found = self._admit(self, answer.files)
            self._versions = {file.path: file for file in self.found}
            missing = [file for file in self.found if not self._folder.has(file)]
            self._folder.check_space(sum(file.size for file in missing))
        except CannotFetchError as error:
            self.end(str(error))
            return []
        except OSError as error:
            return self._fail(error)
        same = before == self.found
        if not missing and (same or not self.is_whole):
            self.end("")
            return []
        self._rounds += 1
        if self._rounds > ROUNDS:
            self.end("files change faster than they can be fetched")
            return []
        self._changed = set()
        self.left_bytes = sum(file.size for file in missing)
        self._next = self._read(missing)
        return self._go_on()

    def _take_read(self, part: FileRead) -> list[Order]:
        asked = self._asked[0] if self._asked else None
        if not isinstance(asked, ReadFile) or (asked.path, asked.offset) != (part.path, part.offset):
            return []
        self._asked.popleft()
        version = self._versions[part.path]
        if self._failure:
            self.end(f"cannot write the files: {self._failure}")
            return []
        try:
            if (part.size, part.changed, part.length) != (version.size, version.changed, asked.size):
                self._changed.add(part.path)
                self._folder.drop(part.path)
            elif part.path not in self._changed:
                self.left_bytes -= part.length
                self.fetched_bytes += part.length
                if part.offset + part.length == version.size:
                    self._finish(version)
            return self._go_on()
        except OSError as error:
            return self._fail(error)

    def _read(self, files: Sequence[FoundFile]) -> Iterator[ReadFile]:
        """Yields the orders to read these files, which are opened one after the other."""
        for file in files:
            offset = self._folder.begin(file)
            self.left_bytes -= offset
            if offset == file.size:
                self._finish(file)
            while offset < file.size and file.path not in self._changed:
                size = min(PIECE, file.size - offset)
                yield ReadFile(self._order.number, self._order.directory, file.path, offset, size)
                offset += size

    def _finish(self, file: FoundFile) -> None:
        if self._folder.finish(file.path):
            self.fetched_files += 1
        else:  # the node sends something other than it has listed
            self._changed.add(file.path)

    def _go_on(self) -> list[Order]:
        orders: list[Order] = []
        while len(self._asked) + len(orders) < ASKED_AT_ONCE:
            try:
                order = next(self._next, None)
            except OSError as error:
                return self._fail(error)
            if order is None:
                break
            orders.append(order)
        if not orders and not self._asked:
            if not self._changed and not self.is_whole:
                self.end("")
                return []
            orders = [self._order]
        return self._ask(orders)

    def _ask(self, orders: list[Order]) -> list[Order]:
        self._asked.extend(orders)
        return orders

    def _fail(self, error: OSError) -> list[Order]:
        self.end(f"cannot write {os.fspath(error.filename or self._folder.root)}: {error.strerror}")
        return []
