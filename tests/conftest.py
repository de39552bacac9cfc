"""What several test modules need: the installed command, run as a user runs it."""

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

import hypothesis
import pytest

from tests.scheduling import Longest

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "programs"

# What a test takes depends on what else runs: none is a timed one.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


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
        """The events of a kind in events.jsonl."""
        entries = map(json.loads, (self.directory / "events.jsonl").read_text().splitlines())
        return [entry for entry in entries if entry["event"] == kind]

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


COSTLY = {"tensorflow", "ssh", "docker", "browser", "prometheus", "slurm", "kubernetes", "slow"}
"""Marks of tests that only a complete run has, unless they are marked `quick` as well."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all tests, not only the quick ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the quick tests, unless others are asked for: by --all, by -m, by the name of a module or of a test.

    With DISTLAUNCH_QUICK_PASSED set, as in CI after the quick tests have passed, --all runs only the others.
    """
    if config.option.markexpr:
        return
    if config.option.all:
        if os.environ.get("DISTLAUNCH_QUICK_PASSED"):
            _keep(items, config, lambda item: not _is_quick(item))
        return
    # What is named is collected and nothing else, so a file or a test among the names is what its items come from.
    named = [Path(config.invocation_params.dir, name.partition("::")[0]) for name in config.args]
    modules = {path.resolve() for path in named if path.is_file()}
    _keep(items, config, lambda item: _is_quick(item) or item.path in modules)


def _is_quick(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return "quick" in marks or not marks & COSTLY


def _keep(items: list[pytest.Item], config: pytest.Config, is_kept: Callable[[pytest.Item], bool]) -> None:
    kept = [item for item in items if is_kept(item)]
    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = kept


_COUNTED = pytest.StashKey[set[str]]()
UNCOUNTED = {
    "test_children",
    "test_console",
    "test_detached",
    "test_early_import",
    "test_failures",
    "test_plan",
    "test_processes",
    "test_restarts",
    "test_ssh",
    "test_transports",
}
"""Modules whose processes run next to no line that no other process of the quick tests runs."""
COUNTED_TESTS = 12
"""Of each other module or class, the processes of so many tests are counted."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Chooses the tests whose processes are counted."""
    first_cases: dict[str, dict[str, str]] = {}
    for item in session.items:
        cases = first_cases.setdefault(getattr(item.parent, "nodeid", ""), {})
        cases.setdefault(item.name.partition("[")[0], item.nodeid)
    session.config.stash[_COUNTED] = {
        case for each in first_cases.values() for case in [*each.values()][:COUNTED_TESTS]
    }


@pytest.fixture(autouse=True)
def leave_processes_uncounted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lines are counted: those of this process always, those of processes that it starts not everywhere.

    To count the lines of a process takes 70 to 200 ms of CPU. Of a test with several cases, those of the first one
    count. That, UNCOUNTED and COUNTED_TESTS leave a third of all processes: the count lacks one line of a hundred.
    """
    if request.path.stem in UNCOUNTED or request.node.nodeid not in request.config.stash[_COUNTED]:
        monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)


def pytest_xdist_auto_num_workers() -> int:
    """Two for each core: half of the time a test waits. More would take more memory than a small machine has."""
    return min(2 * (os.cpu_count() or 1), 8)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Longest:
    # Not xdist's own `loadgroup`: from pytest 9.2 on, xdist 3.8 cannot mark tests for it.
    return Longest(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With DISTLAUNCH_NO_SKIPS set, as in CI, a skipped test fails the run: its part was there and was not tested."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("DISTLAUNCH_NO_SKIPS") and skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
