"""What several test modules need: the installed command, run as a user runs it."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"


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

    def log(self, task: str = "worker-0") -> bytes:
        return (self.directory / "attempt-1" / f"{task}.log").read_bytes()

    def line(self, pattern: str, task: str = "worker-0") -> re.Match[str]:
        """The one line of a task's log that is so as a whole; after a program's last one TensorFlow may chatter."""
        log = self.log(task).decode()
        found = [*re.finditer(f"^{pattern}$", log, re.MULTILINE)]
        assert len(found) == 1, log
        return found[0]


Distlaunch = Callable[..., Ran]


def distlaunch_command(*arguments: str) -> list[str]:
    """The command line of the installed command, by this interpreter."""
    return [sys.executable, "-m", "launcher", *arguments]


@pytest.fixture
def distlaunch(tmp_path: Path) -> Distlaunch:
    """Runs `distlaunch VERB --run-dir … ARGUMENTS` in an empty folder; the run's files are in `Ran.directory`."""

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
            distlaunch_command(verb, *place, *arguments),
            cwd=cwd or tmp_path,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr, directory)

    return run


@functools.cache
def group_of(module: str) -> str:
    """Two modules run at once, but never two with SSH, whose hosts have the same addresses."""
    return "hosts" if "pytest.mark.ssh" in (ROOT / module).read_text() else module


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Sends all tests of a group to the same process, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    # Not xdist's own `loadgroup`: from pytest 9.2 on, xdist 3.8 cannot mark tests for it.
    return Groups(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With DISTLAUNCH_NO_SKIPS set, as in CI, a skipped test fails the run: its part was there and was not tested."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("DISTLAUNCH_NO_SKIPS") and skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
