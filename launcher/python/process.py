"""Starts a controller process, and receives its messages."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from launcher.errors import DistlaunchError, as_ours
from launcher.python.exchange import Began, Ended, News, NotStarted, Order, parse, send
from launcher.report.models import RunReport

_CODE = "import sys; sys.path[:] = sys.argv[1:]; from launcher.python.controller import main; main()"
"""The controller has the import path of this process, except for the current folder."""
STDERR_BYTES = 4096
STDERR_LINES = 5


class ControllerLostError(DistlaunchError):
    """The controller of the run has ended without a result: it was killed, or it has a bug."""

    reference = "controller-lost"


class ControllerProcess:
    """A running controller. One thread waits for its messages; any thread may call the methods.

    Raises:
        ProcessLimitError: no process or thread can be started.
    """

    def __init__(self, order: Order) -> None:
        self.began = threading.Event()
        """The run has its folder, or is over."""
        self.over = threading.Event()
        """The process has ended."""
        self.directory: Path | None = None
        self._news: News | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        command = [sys.executable, "-c", _CODE, *(path for path in sys.path if path)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                start_new_session=True,  # the terminal's Ctrl-C is for this process
            )
        except OSError as error:
            self._stderr.close()
            raise as_ours(error) from None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has already ended; the thread detects that
            send(self._process.stdin, order)
        try:
            threading.Thread(target=self._read, name="distlaunch", daemon=True).start()
        except RuntimeError as error:
            self._process.kill()
            self._process.communicate()
            self._stderr.close()
            raise as_ours(error) from None

    def ask_to_stop(self, signum: int = signal.SIGTERM) -> None:
        """Stops the run as this signal does, even before the run has a folder."""
        self._process.send_signal(signum)

    def result(self) -> RunReport:
        """The report of the run; call it after `over` is set.

        Raises:
            DistlaunchError: the run could not be started, or its controller was lost.
        """
        if isinstance(self._news, Ended):
            return RunReport.model_validate_json(self._news.report)
        raise self._error()

    def _error(self) -> DistlaunchError:
        if isinstance(self._news, NotStarted):
            return self._news.make_error()
        status = self._process.returncode
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        return ControllerLostError(
            f"the controller of the run has ended with {how}, without a result",
            evidence=self._last_words,
            hint=f"`distlaunch clean {self.directory}` stops leftover processes" if self.directory else "",
        )

    def _read(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # the line was cut off when the process ended
                news = parse(line)
                if isinstance(news, Began):
                    self.directory = Path(news.directory)
                    self.began.set()
                else:
                    self._news = news
        self._process.wait()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        size = os.fstat(self._stderr.fileno()).st_size
        self._stderr.seek(max(size - STDERR_BYTES, 0))
        words = self._stderr.read().decode("utf-8", "replace").splitlines()
        self._last_words = [line for line in words if line.strip()][-STDERR_LINES:]
        self._stderr.close()
        self.over.set()
        self.began.set()
