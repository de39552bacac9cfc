"""Writes the metrics of a run to a file, for the textfile collector of node_exporter."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from launcher.clock import SystemTiming
from launcher.errors import UsageError
from launcher.report.metrics import make_registry
from launcher.report.status_report import RunStatus
from launcher.rundir.replacement import replace_text

EVERY_S = 5.0
LAST_S = 2.0
"""How long the last state may take to be written."""


class MetricsFile:
    """A metrics file, replaced every few seconds and at the end; a failed write does not fail the run.

    Raises:
        UsageError: no file can be written at `path`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._registry: CollectorRegistry | None = None
        self._warn: Callable[[str], None] = lambda _: None
        self._failed = False
        self._lock = threading.Lock()
        self._end: Callable[[], None] = lambda: None
        if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(
                f"cannot write the metrics to {path}", hint="name a file in a folder that exists and is writable"
            )

    def begin(self, make_status: Callable[[], RunStatus], warn: Callable[[str], None]) -> None:
        """Starts to write the run's state; calls `warn` with the first failure."""
        self._warn = warn
        self._registry = make_registry(make_status)
        self._end = SystemTiming().repeat(self._write, EVERY_S)

    def close(self) -> None:
        """Writes the last state; does not wait for a disk that hangs."""
        self._end()
        last = threading.Thread(target=self._write, daemon=True)
        last.start()
        last.join(LAST_S)

    def _write(self) -> bool:
        with self._lock:
            if self._registry is not None:
                try:
                    # Not the library's own function: in a shared folder, it could write through a link.
                    replace_text(self._path, generate_latest(self._registry).decode(), 0o644)
                except Exception as error:  # noqa: BLE001 - the run must continue whatever it is
                    self._note_failure(error)
        return False

    def _note_failure(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            self._warn(f"cannot write the metrics to {self._path}: {reason}; the run continues")
