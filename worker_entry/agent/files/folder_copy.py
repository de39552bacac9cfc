"""Copies a folder of files from the controller to a node, which fetches the files piece by piece."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from typing import BinaryIO, Optional

from worker_entry.protocol.messages import Fetch, Message, Refused
from worker_entry.protocol.orders import Offer, Piece
from worker_entry.protocol.values import FileEntry, Problem

PIECE = 1 << 20
"""How many bytes are hashed or fetched at once; between two pieces, the agent does its other work."""
FETCHES_AT_ONCE = 4


class CannotCopyError(Exception):
    """The folder cannot be copied; the message is shown to the user."""


class FolderCopy:
    """One copy. `step` does a part of the work; `send` sends a message to the controller.

    Subclasses do the work in `_copy`, a generator that yields after each small part, and undo unfinished work in
    `_undo`.
    """

    def __init__(self, offer: Offer, send: Callable[[Message], None]) -> None:
        self.done = False
        self.directory: Optional[str] = None
        """The folder in which tasks run from now on; None if that does not change."""
        self._offer = offer
        self._send = send
        self._awaited: deque[Fetch] = deque()
        self._pieces: deque[bytes] = deque()
        self._fetched = 0
        self._left = 0
        """Bytes that are still to be asked for."""
        self._work = self._copy()

    @property
    def waits(self) -> bool:
        """Whether no work is possible until another piece arrives."""
        return self.done or (bool(self._awaited) and not self._pieces)

    def step(self) -> None:
        """Does the next small part of the work."""
        if self.waits:
            return
        try:
            next(self._work, None)
        except CannotCopyError as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"{error.filename or self._offer.to}: {error.strerror}")

    def take(self, piece: Piece, body: bytes) -> None:
        """Accepts a piece that has arrived; ignores a piece that was not requested, or arrives twice."""
        expected = self._awaited[len(self._pieces)] if len(self._pieces) < len(self._awaited) else None
        if expected is not None and (expected.index, expected.offset, expected.checkpoint) == (
            piece.index,
            piece.offset,
            piece.checkpoint,
        ):
            self._pieces.append(body)

    def resume(self) -> None:
        """Requests pieces again over a new connection: pieces requested over the old connection may not arrive."""
        for fetch in list(self._awaited)[len(self._pieces) :]:
            self._send(fetch)

    def abandon(self) -> None:
        """Stops, and undoes what is unfinished."""
        self.done = True
        self._undo()

    def _fail(self, reason: str) -> None:
        self.abandon()
        self._send(Refused([Problem("sync-failed", reason, "")]))

    def _copy(self) -> Generator[None, None, None]:
        raise NotImplementedError

    def _undo(self) -> None:
        raise NotImplementedError

    def _fetch(
        self, index: int, entry: FileEntry, file: BinaryIO, update: Callable[[bytes], None]
    ) -> Generator[None, None, None]:
        """Fetches a file; `update` gets each piece that is written."""
        asked = got = 0
        while got < entry.size:
            while asked < entry.size and len(self._awaited) < FETCHES_AT_ONCE:
                size = min(PIECE, entry.size - asked)
                fetch = Fetch(index, asked, size, self._left, self._offer.checkpoint)
                self._left -= fetch.size
                self._awaited.append(fetch)
                self._send(fetch)
                asked += fetch.size
            while not self._pieces:
                yield
            piece, fetch = self._pieces.popleft(), self._awaited.popleft()
            if len(piece) != fetch.size:
                raise CannotCopyError(f"{entry.path!r} changed while it was sent; start again")
            file.write(piece)
            update(piece)
            got += len(piece)
            self._fetched += len(piece)


def make_copy(offer: Offer, send: Callable[[Message], None]) -> FolderCopy:
    """The copy of what is offered."""
    if offer.checkpoint:
        from worker_entry.agent.files.checkpoint_copy import CheckpointCopy

        return CheckpointCopy(offer, send)
    from worker_entry.agent.files.program_copy import ProgramCopy

    return ProgramCopy(offer, send)


def inside(folder: str, path: str) -> str:
    """Joins the path to the folder. The controller's paths are checked, not trusted."""
    parts = path.split("/")
    if not path or path.startswith("/") or ".." in parts:
        raise CannotCopyError(f"{path!r} is outside the folder that was sent")
    return os.path.join(folder, path)
