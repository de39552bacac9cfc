"""The installed command, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_BUG
from tests.harness.rules import second_chance


@dataclass(frozen=True)
class Ran:
    """A finished `distlaunch` command."""

    status: int
    stdout: str
    stderr: str
    directory: Path

    @property
    def report(self) -> dict[str, Any]:
        """The run's report.json."""
        loaded: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return loaded

    def events(self, kind: str) -> list[dict[str, Any]]:
        return read_events(self.directory, kind)

    def log(self, task: str = "worker-0") -> bytes:
        return (self.directory / "attempt-1" / f"{task}.log").read_bytes()

    def line(self, pattern: str, task: str = "worker-0") -> re.Match[str]:
        """The only line of a task's log that matches; TensorFlow may print more after the program's last line."""
        log = self.log(task).decode()
        found = [*re.finditer(f"^{pattern}$", log, re.MULTILINE)]
        assert len(found) == 1, log
        return found[0]


def read_events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind that a run has written to its events.jsonl."""
    entries = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [entry for entry in entries if entry["event"] == kind]


Distlaunch = Callable[..., Ran]
Command = Callable[..., list[str]]


def both(folder: Path, first: str, then: str) -> list[str]:
    """A shell command for two tasks that begin to end at the same time, each independently of the other.

    Otherwise, the end of one may stop the other, which may not even have begun.
    """
    wait = f"touch {folder}/here-$$; until [ $(ls {folder} | grep -c here-) = 2 ]; do sleep 0.05; done"
    return ["sh", "-c", f"trap '' TERM; {first}; {wait}; {then}"]


def distlaunch_command(*arguments: str) -> list[str]:
    """The command line that runs distlaunch with this interpreter."""
    return [sys.executable, "-m", "launcher", *arguments]


def make_distlaunch(tmp_path: Path, command: Command = distlaunch_command) -> Distlaunch:
    def run(
        verb: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 120.0,
        run_dir: bool = True,
    ) -> Ran:
        directory = tmp_path / "run"
        place = ["--run-dir", str(directory)] if run_dir else []
        done = subprocess.run(
            command(verb, *place, *arguments),
            cwd=cwd or tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        if done.returncode == EXIT_BUG:
            raise second_chance.NoSecondChanceError(f"exit status {EXIT_BUG}:\n{done.stderr}")
        return Ran(done.returncode, done.stdout, done.stderr, directory)

    return run
