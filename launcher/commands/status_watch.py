"""Polls a run's controller for its status on a separate thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from launcher.commands.requests import ask_status
from launcher.console.live_view import Seen
from launcher.errors import DistlaunchError
from launcher.report.status_report import RunStatus
from launcher.rundir.directory import RunDir
from launcher.wording import render_age

ASK_S = 1.0


class StatusWatch:
    """The last status from the controller. The thread ends soon after `close`, at the latest with the process."""

    def __init__(self, files: RunDir) -> None:
        self._files = files
        self._closed = threading.Event()
        self._status: RunStatus | None = None
        self._problem = ""
        self._answered = time.monotonic()
        threading.Thread(target=self._run, name="status", daemon=True).start()

    def seen(self) -> Seen:
        """The last status; returns at once."""
        problem, silent_s = self._problem, time.monotonic() - self._answered
        if not problem and silent_s > 3 * ASK_S:
            problem = "the controller does not answer"
        if problem and self._status is not None:
            problem += f"; its last answer is {render_age(silent_s)} old"
        return Seen(self._status, problem)

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while True:
            try:
                self._status = ask_status(self._files)
                self._answered, self._problem = time.monotonic(), ""
            except DistlaunchError as error:
                self._problem = error.message
            if self._closed.wait(ASK_S):
                return


@contextlib.contextmanager
def watched_status(files: RunDir) -> Iterator[StatusWatch]:
    watch = StatusWatch(files)
    try:
        yield watch
    finally:
        watch.close()
