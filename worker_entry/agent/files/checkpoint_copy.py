"""Brings the last checkpoint of a run to a node, before its tasks start."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from worker_entry.agent.files.folder_copy import FolderCopy, inside
from worker_entry.protocol.messages import Synced
from worker_entry.protocol.values import FileEntry

PART = ".distlaunch-part"
"""The name of the file that is being written, in the folder of checkpoints."""


class CheckpointCopy(FolderCopy):
    """Replaces files of the folder of checkpoints that differ, by size or time; leaves all others alone.

    A node keeps its checkpoints if one of these files is newer than all that are offered: then they are on a disk that
    nodes share, or the node has saved since the files were collected.
    """

    def _copy(self) -> Generator[None, None, None]:
        folder, files = os.path.expanduser(self._offer.to), self._offer.files
        newest = max((entry.changed for entry in files), default=0)
        places = [inside(folder, entry.path) for entry in files]
        facts = [_changed(place) for place in places]
        if any(changed > newest for changed, _ in facts):
            self._end(folder, 0, newer=True)
            return
        missing = [number for number, entry in enumerate(files) if facts[number] != (entry.changed, entry.size)]
        self._left = sum(files[number].size for number in missing)
        os.makedirs(folder, exist_ok=True)  # the user's own folder: as their program would make it
        for number in missing:
            yield from self._replace(number, places[number], files[number])
        self._end(folder, len(missing))

    def _replace(self, number: int, place: str, entry: FileEntry) -> Generator[None, None, None]:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        part = self._part
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        with open(part, "xb") as file:
            yield from self._fetch(number, entry, file, lambda _: None)
        os.utime(part, ns=(entry.changed, entry.changed))
        os.replace(part, place)

    @property
    def _part(self) -> str:
        return os.path.join(os.path.expanduser(self._offer.to), PART)

    def _undo(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._part)

    def _end(self, folder: str, fetched: int, *, newer: bool = False) -> None:
        self.done = True
        self._send(Synced(folder, fetched, self._fetched, checkpoint=True, newer=newer))


def _changed(path: str) -> tuple[int, int]:
    """When the file was changed, in nanoseconds, and its size; negative if there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return -1, -1
    return facts.st_mtime_ns, facts.st_size
