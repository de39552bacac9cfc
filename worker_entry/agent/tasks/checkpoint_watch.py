"""Watches the checkpoint directory of an attempt's tasks for what they save."""

from __future__ import annotations

import contextlib
import os
from typing import Optional

from worker_entry.protocol import environment, orders
from worker_entry.protocol.messages import Saved
from worker_entry.system import clock

LOOK_S = 2.0
QUIET_S = 0.5
"""An entry that was last changed so long ago is complete. Without this, nobody would learn of the checkpoints of a
program that saves more often than we look."""

_Entry = tuple[int, str]
"""When an entry of the directory was changed, in nanoseconds, and its name."""


class CheckpointWatch:
    """Reports the newest entry of the directory once it is complete: it is quiet, or two looks find it unchanged.

    The second sign is for a file server whose clock is ahead of ours.
    """

    def __init__(self) -> None:
        self._directory = ""
        self._due = 0.0
        self._last: Optional[_Entry] = None
        self._reported: Optional[_Entry] = None

    def begin(self, directory: str) -> None:
        """Watches this directory for new entries from now on; an empty path means none."""
        self._directory = directory
        self._last = self._reported = _find_newest(directory)

    def poll(self, now: float) -> Optional[Saved]:
        """What was saved since the last call; `now` is in monotonic seconds."""
        if not self._directory or now < self._due:
            return None
        self._due = now + LOOK_S
        before, self._last = self._last, _find_newest(self._directory)
        if self._last is None or self._last == self._reported:
            return None
        is_quiet = clock.now() - self._last[0] / 1e9 >= QUIET_S
        return self._report(self._last) if is_quiet or self._last == before else None

    def end(self) -> Optional[Saved]:
        """What was saved since the last call; stops watching, because no task writes there any more."""
        directory, self._directory = self._directory, ""
        newest = _find_newest(directory)
        return self._report(newest) if newest is not None and newest != self._reported else None

    def _report(self, entry: _Entry) -> Saved:
        self._reported = entry
        changed, name = entry
        return Saved(name[:200], changed / 1e9)


def _find_newest(directory: str) -> Optional[_Entry]:
    newest: Optional[_Entry] = None
    if directory:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # gone again
                    found = entry.stat().st_mtime_ns, entry.name
                    newest = found if newest is None else max(newest, found)
    return newest


def find_checkpoints(order: orders.Start, cwd: str) -> str:
    """The tasks' checkpoint directory; empty if they have none."""
    directory = next((start.env.get(environment.CHECKPOINT_DIR, "") for start in order.tasks), "")
    return os.path.join(cwd, os.path.expanduser(directory)) if directory else ""
