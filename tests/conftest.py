"""Fixtures and hooks for all test modules, above all the installed command, run as a user runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from launcher.errors import EXIT_BUG
from tests.harness.available import find_python
from tests.harness.places import ROOT
from tests.harness.processes.commands import Distlaunch, Ran, make_distlaunch
from tests.harness.processes.in_process import run_here
from tests.harness.processes.warm_python import WarmPython
from tests.harness.rules import second_chance, tiers, version_rows
from tests.harness.rules.inherited import leave_orphans, read_state, reset_inherited_state
from tests.harness.rules.scheduling import Longest

# The duration of a test depends on what else is running, so no test has a deadline. mutmut runs a test several times in
# one process.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.differing_executors]
)
hypothesis.settings.load_profile("untimed")


@pytest.fixture
def distlaunch(tmp_path: Path) -> Distlaunch:
    """Runs `distlaunch VERB --run-dir … ARGUMENTS` in an empty folder; the run's files are in `Ran.directory`."""
    return make_distlaunch(tmp_path)


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """An interpreter whose runs on this machine find TensorFlow imported, and keep it so."""
    python = WarmPython(tmp_path_factory.mktemp("warm"))
    yield python
    python.end()


@pytest.fixture
def warm(tmp_path: Path, warm_python: WarmPython) -> Distlaunch:
    """The same as `distlaunch`, with that interpreter."""
    return make_distlaunch(tmp_path, warm_python.command)


@pytest.fixture
def in_process(tmp_path: Path) -> Distlaunch:
    """The same as `distlaunch`, for a command that starts nothing: in this process."""

    def run(
        verb: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        run_dir: bool = True,
    ) -> Ran:
        directory = tmp_path / "run"
        place = ["--run-dir", str(directory)] if run_dir else []
        done = run_here(verb, *place, *arguments, cwd=cwd or tmp_path, env=env)
        assert done.returncode != EXIT_BUG, done.stderr
        return Ran(done.returncode, done.stdout, done.stderr, directory)

    return run


@pytest.fixture(scope="session")
def python39() -> str:
    """The oldest Python that nodes may have."""
    python = find_python("3.9")
    if python is None:
        pytest.skip("no python3.9 on PATH or from pyenv")
    return python


def pytest_configure(config: pytest.Config) -> None:
    reset_inherited_state()  # not at import: processes of tests import this module, too, with variables of their own
    config.pluginmanager.register(second_chance)
    config.pluginmanager.register(tiers)
    config.pluginmanager.register(version_rows)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all tests, not only those that run by default")
    parser.addoption(
        "--versions",
        action="store_true",
        help="run nothing but tests of other versions: the oldest, newest and nightly TensorFlow, and Keras on PyTorch",
    )
    parser.addoption(
        "--since",
        metavar="REVISION",
        help="run the main promises of all parts, and the costly tests of what has changed since this revision",
    )


@pytest.fixture(scope="session", autouse=True)
def work_in_root() -> Iterator[None]:
    """Runs the tests in the same folder, wherever pytest was started: its arguments are relative to that place."""
    before = Path.cwd()
    os.chdir(ROOT)
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def keep_state() -> Iterator[None]:
    """Fails the test that changes its process, and not one that runs after it."""
    before = read_state()
    yield
    leave_orphans()
    after = read_state()
    changed = {name: (before.get(name), after.get(name)) for name in before | after}
    assert {name: values for name, values in changed.items() if values[0] != values[1]} == {}


def pytest_xdist_auto_num_workers() -> int:
    """Two per core, because tests wait half of the time. More would need more memory than a small machine has."""
    return min(2 * (os.cpu_count() or 1), 8)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Longest:
    # Not xdist's own `loadgroup`: from pytest 9.2 on, xdist 3.8 cannot mark tests for it.
    return Longest(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With DISTLAUNCH_NO_SKIPS set, as in CI, lets a skipped test fail the run: CI has all that the tests need."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    if os.environ.get("DISTLAUNCH_NO_SKIPS") and skipped:
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        failures = session.config.pluginmanager.get_plugin("failures")
        if failures is not None:
            for report in skipped:
                failures.note(second_chance.Failure(report.nodeid, "it was skipped", report.longreprtext))
