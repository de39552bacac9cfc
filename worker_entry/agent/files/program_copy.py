"""Copies the program's folder to a node: versions side by side (see `versions`), and a link to the current one.

A new version is built in a separate folder, from unchanged files of the last version and from fetched files. Every file
is checked by its hash; then the version gets its name, and the link is switched. So a task never sees an incomplete
version, and a running task keeps its version.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Generator
from typing import Optional

from worker_entry.agent.files.folder_copy import PIECE, CannotCopyError, FolderCopy, inside
from worker_entry.agent.files.versions import Versions
from worker_entry.protocol.messages import Message, Noted, Synced
from worker_entry.protocol.orders import Offer
from worker_entry.protocol.values import FileEntry


class ProgramCopy(FolderCopy):
    """Copies one version to this node."""

    def __init__(self, offer: Offer, send: Callable[[Message], None]) -> None:
        super().__init__(offer, send)
        self._versions = Versions(offer.to)
        self._building = ""

    def _undo(self) -> None:
        if self._building:
            shutil.rmtree(self._building, ignore_errors=True)

    def _copy(self) -> Generator[None, None, None]:
        current = self._versions.find_current()
        missing = yield from self._compare(current)
        self._left = sum(self._offer.files[index].size for index in missing)
        if current is None or missing or not self._versions.is_of(current, self._offer.digest):
            self._building = self._versions.make_building()
            yield from self._build(current, missing)
            self._versions.release(current)
            current = self._versions.finish(self._building, self._offer.digest, self._offer.files)
            self._building = ""
        self._versions.switch(current)
        for kept in self._versions.clean(current):
            if kept is not None:
                self._send(Noted(f"files that tasks wrote to an old version of {self._offer.to} are kept in {kept}"))
            yield
        self.directory = current
        self.done = True
        self._send(Synced(current, len(missing), self._fetched))

    def _compare(self, current: Optional[str]) -> Generator[None, None, set[int]]:
        """Finds the indexes of offered files that are missing or different in the current version."""
        missing = set()
        for index, entry in enumerate(self._offer.files):
            try:
                same = current is not None and (yield from self._is_same(entry, os.path.join(current, entry.path)))
            except OSError:  # a task of another run is changing it
                same = False
            if not same:
                missing.add(index)
        return missing

    def _is_same(self, entry: FileEntry, path: str) -> Generator[None, None, bool]:
        if entry.link:
            return os.path.islink(path) and os.readlink(path) == entry.link
        if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) != entry.size:
            return False
        if bool(os.stat(path).st_mode & 0o100) != entry.executable:
            return False
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
                yield
        return digest.hexdigest() == entry.sha256

    def _build(self, current: Optional[str], missing: set[int]) -> Generator[None, None, None]:
        # Links come last, so that no file is ever written through a link.
        for index, entry in sorted(enumerate(self._offer.files), key=lambda item: bool(item[1].link)):
            path = inside(self._building, entry.path)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            if entry.link:
                inside(self._building, os.path.normpath(os.path.join(os.path.dirname(entry.path), entry.link)))
                os.symlink(entry.link, path)
                continue
            old = os.path.join(current, entry.path) if current is not None and index not in missing else None
            if old is None or not (yield from self._take_over(old, path, entry)):
                self._left += 0 if index in missing else entry.size
                missing.add(index)
                yield from self._receive(index, path, entry)
            os.chmod(path, 0o700 if entry.executable else 0o600)

    def _take_over(self, old: str, path: str, entry: FileEntry) -> Generator[None, None, bool]:
        """Copies an unchanged file; false if a task of another run has changed the file since the comparison."""
        digest = hashlib.sha256()
        try:
            with open(old, "rb") as source, open(path, "xb") as file:
                while piece := source.read(PIECE):
                    file.write(piece)
                    digest.update(piece)
                    yield
        except FileNotFoundError:
            return False
        if digest.hexdigest() != entry.sha256:
            os.unlink(path)
            return False
        return True

    def _receive(self, index: int, path: str, entry: FileEntry) -> Generator[None, None, None]:
        digest = hashlib.sha256()
        with open(path, "xb") as file:
            yield from self._fetch(index, entry, file, digest.update)
        if digest.hexdigest() != entry.sha256:
            raise CannotCopyError(f"{entry.path!r} changed while it was sent; start again")
