"""A run in the background, for tests that act on it meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.polling import HANG_S
from tests.harness.processes.commands import Command, distlaunch_command, read_events
from tests.harness.witness import await_none_left, make_mark, wait_until

Popen = Callable[[list[str], int], "subprocess.Popen[bytes]"]
"""Starts a command with this descriptor as its stderr."""


class BackgroundRun:
    """`distlaunch VERB ARGUMENTS`, started by `popen`; its files are in `directory`."""

    def __init__(
        self, folder: Path, verb: str, arguments: Sequence[str], popen: Popen, command: Command = distlaunch_command
    ) -> None:
        self.directory = folder / "run"
        self._stderr = folder / "stderr"
        with self._stderr.open("wb") as stderr:
            self.process = popen(command(verb, "--run-dir", str(self.directory), *arguments), stderr.fileno())

    @property
    def said(self) -> str:
        return self._stderr.read_text()

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return loaded

    def log(self, worker: int, attempt: int = 1) -> bytes:
        path = self.directory / f"attempt-{attempt}" / f"worker-{worker}.log"
        return path.read_bytes() if path.exists() else b""

    def wait_for_process(self, worker: int) -> int:
        """Waits until the run knows the worker's process; returns its pid."""
        wait_until(lambda: bool(self._find_started(worker)), f"worker:{worker} has started")
        return self._find_started(worker)[0]

    def _find_started(self, worker: int) -> list[int]:
        events = read_events(self.directory, "task-started")
        return [event["pid"] for event in events if event["task"] == f"worker:{worker}"]

    def wait_for(self, text: bytes, *workers: int) -> None:
        """Waits until the logs of the workers (both, if none is named) have the text."""
        wait_until(lambda: all(text in self.log(n) for n in workers or (0, 1)), f"logs have {text!r}")

    def wait_until_said(self, text: str) -> None:
        wait_until(lambda: text in self.said, f"it says {text!r}")

    def end(self) -> int:
        """Waits for the run's end; returns distlaunch's exit status."""
        try:
            self.process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not ended within {HANG_S:g} s: {self.said}")
        return self.process.returncode


@contextlib.contextmanager
def running(folder: Path, *arguments: str, command: Command = distlaunch_command) -> Iterator[BackgroundRun]:
    """A local run, ended by Ctrl-C if it still runs; asserts that no process of it is left."""
    mark = make_mark()

    def popen(argv: list[str], stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, **mark},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
        )

    run = BackgroundRun(folder, "local", arguments, popen, command)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.wait(30)
    await_none_left(mark)
