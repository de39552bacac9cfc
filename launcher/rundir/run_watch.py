"""Finds out from a run's files alone whether the run is over, and how it ended."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from launcher.errors import RunDirectoryError, UsageError
from launcher.rundir.directory import RunDir
from launcher.rundir.queued import ASK_SLURM_S, find_queued
from launcher.rundir.record import read_record
from launcher.rundir.summary import summarize

ASK_S = 1.0
"""How often to look at the controller's process."""


class RunWatch:
    """A watch that reads run.json only after changes, and looks at the controller's process once a second."""

    def __init__(self, files: RunDir) -> None:
        self.facts: Mapping[str, Any] = {}
        """The content of run.json."""
        self.is_lost = False
        """Whether the controller is gone and recorded no end."""
        self._files = files
        self._seen: tuple[int, int] | None = None
        self._asked = time.monotonic()
        self._asked_slurm = -ASK_SLURM_S
        self._waits = True

    def is_over(self) -> bool:
        """Whether the run has ended, or its controller is gone."""
        self._read()
        if self.facts.get("waits"):
            return not self._is_queued()
        if not self.facts.get("ended") and time.monotonic() - self._asked >= ASK_S:
            self._asked = time.monotonic()
            gone = self._is_gone()
            self._read()  # the run may have ended in the meantime
            self.is_lost = gone and not self.facts.get("ended")
        return bool(self.facts.get("ended")) or self.is_lost

    def _is_queued(self) -> bool:
        if time.monotonic() - self._asked_slurm >= ASK_SLURM_S:
            self._asked_slurm = time.monotonic()
            with contextlib.suppress(RunDirectoryError):
                record = read_record(self._files)
                self._waits = not record.waits or find_queued(record) is not None
        return self._waits

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            status = self._files.run.stat()
            if self._seen != (status.st_ino, status.st_mtime_ns):
                facts = json.loads(self._files.run.read_bytes())
                self.facts = facts if isinstance(facts, dict) else {}
                self._seen = status.st_ino, status.st_mtime_ns

    def _is_gone(self) -> bool:
        try:
            _, controller = self._files.read_run()
        except UsageError:  # the controller is on another machine; only its files are visible here
            return False
        except RunDirectoryError:
            return True
        return controller is None

    def exit_status(self) -> int | None:
        """The run's exit status; None if it is not known."""
        if isinstance(status := self.facts.get("exit_status"), int):
            return status
        with contextlib.suppress(RunDirectoryError):
            return summarize(self._files).exit_status
        return None
