"""Failed tests get a second chance, unless the failure shows a defect however busy the machine is.

As a plugin of pytest, it notes each failure, and whether the test may run again, in the file that DISTLAUNCH_FAILED
names: one JSON object a line. As a program, `python -m tests.harness.rules.second_chance FILE…` runs the tests of such
files again, once alone and twice beside busy programs; pytest's options, among them the seed, come from PYTEST_ADDOPTS.
It fails if any test fails again; otherwise it prints the unreliable tests, each with its first failure.

There is no second chance for a test that no other process, thread or connection can have disturbed, neither by itself
nor through a fixture that it shares with other tests; for a process that is left behind; for a bug that distlaunch
reports of itself, with exit status 70; for a byte of a log that is lost or doubled; for a test that was skipped; and
for a crash of pytest itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

FILE = "DISTLAUNCH_FAILED"
BUG = "a bug in distlaunch: "
BUG_STATUS = re.compile(r"assert \(?70\b|\breturncode[:=] ?70\b")
"""The message that distlaunch prints with exit status 70, and how pytest shows that status."""
UNITS = "tests/unit/"
PURE = "pure"
"""The attribute of each report that says whether its test has been pure so far."""
BUSY = 4
"""How many busy programs run beside the second and the third repetition."""
TRIES = ((0, "alone"), (BUSY, f"beside {BUSY} busy programs"), (BUSY, f"again beside {BUSY} busy programs"))
MOST = 20
"""If there are more different failures, something is broken, and repeating them would take the time of a whole run."""
DISTURBED_BY = {
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "socket.bind",
    "socket.connect",
    "subprocess.Popen",
}
"""Python's audit events after which the order of events no longer depends on the test alone."""


class NoSecondChanceError(AssertionError):
    """A failure that shows a defect of distlaunch however busy the machine is."""


def assert_same_bytes(got: bytes, expected: bytes) -> None:
    """Fails without a second chance if bytes of a log are lost, doubled or changed; shows the first difference."""
    if got == expected:
        return
    place = next((n for n, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(got), len(expected)) if place is None else place
    near = slice(max(place - 40, 0), place + 40)
    raise NoSecondChanceError(
        f"{len(got)} bytes instead of {len(expected)}, different from byte {place} on: "
        f"{got[near]!r} instead of {expected[near]!r}"
    )


@dataclass(frozen=True)
class Failure:
    """A failed test. `final`: why it has no second chance, if so. `text`: the failure as pytest shows it."""

    test: str
    final: str
    text: str


# --- in the tests' processes ---


class Purity:
    """Knows which tests are pure: no other process, thread or connection can have disturbed them."""

    def __init__(self) -> None:
        self._disturbed = False
        self._main = threading.get_ident()
        self._fixtures: set[tuple[str, str]] = set()
        """Fixtures that were disturbed, by their name and place; they may live longer than a test."""
        sys.addaudithook(lambda event, _: self._note() if event in DISTURBED_BY else None)
        start = threading.Thread.start

        def start_noted(thread: threading.Thread) -> None:
            self._note()
            start(thread)

        threads: Any = threading.Thread
        threads.start = start_noted  # not audited by all versions of Python

    def _note(self) -> None:
        if threading.get_ident() == self._main:  # not by xdist's own threads
            self._disturbed = True

    def begin(self) -> None:
        self._disturbed = False

    @contextlib.contextmanager
    def fixture(self, fixture: tuple[str, str]) -> Iterator[None]:
        before, self._disturbed = self._disturbed, False
        try:
            yield
        finally:
            if self._disturbed:
                self._fixtures.add(fixture)
            self._disturbed |= before

    def share(self, fixtures: Iterable[tuple[str, str]]) -> None:
        """Notes what outlives this test: in such a fixture, the test may have left what it got from other processes."""
        if self._disturbed:
            self._fixtures.update(fixtures)

    def is_pure(self, fixtures: Iterable[tuple[str, str]]) -> bool:
        return not self._disturbed and self._fixtures.isdisjoint(fixtures)


class TestPlugin:
    """Finds out which failures are final; in each process that runs tests."""

    __test__ = False

    def __init__(self) -> None:
        self._purity = Purity()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._purity.begin()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        with self._purity.fixture((fixturedef.argname, fixturedef.baseid)):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._purity.share(_fixtures_of(item, shared=True))
        if report.failed:
            vars(report)["final"] = self._find_reason(item, call, report)  # travels with the report to the main process
        vars(report)[PURE] = self._purity.is_pure(_fixtures_of(item))
        if call.when == "call" and report.passed and not vars(report)[PURE] and item.nodeid.startswith(UNITS):
            report.outcome = "failed"
            report.longrepr = f"a test in {UNITS} starts no process and no connection; move it to another folder"
            vars(report)["final"] = "it is in the wrong folder"
        return report

    def _find_reason(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> str:
        if call.excinfo is not None and call.excinfo.errisinstance(NoSecondChanceError):
            return call.excinfo.exconly()
        shown = "\n".join([report.longreprtext, *(text for _, text in report.sections)])
        if BUG in shown or BUG_STATUS.search(shown):
            return "distlaunch has reported a bug of its own"
        if self._purity.is_pure(_fixtures_of(item)):
            return "no other process, thread or connection can have disturbed it"
        return ""


def _fixtures_of(item: pytest.Item, *, shared: bool = False) -> Iterator[tuple[str, str]]:
    """The names and places of the fixtures that the test uses: other modules may have others of the same name.

    `shared`: only those that the test names as arguments, and that later tests get as well; none of pytest's own.
    """
    info = getattr(item, "_fixtureinfo", None)
    if info is None:
        return
    for name, found in info.name2fixturedefs.items():
        is_shared = name in info.argnames and found[-1].baseid and found[-1].scope != "function"
        if is_shared or not shared:
            yield name, found[-1].baseid


class NotePlugin:
    """Writes the failures of all processes to a file; only in pytest's main process."""

    __test__ = False

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            final = getattr(report, "final", "the process that ran it has crashed")
            self.note(Failure(report.nodeid, final, report.longreprtext))

    def note(self, failure: Failure) -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(f"{json.dumps(asdict(failure))}\n")


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(TestPlugin())
    if os.environ.get(FILE) and not is_worker:
        config.pluginmanager.register(NotePlugin(Path(os.environ[FILE])), "failures")


# --- afterwards ---


def main(files: Iterable[str]) -> int:
    """Runs the failed tests again; returns the exit status: 0 if all of them are merely unreliable."""
    try:
        failures = [failure for file in files for failure in _read(Path(file))]
    except (OSError, ValueError, TypeError) as error:
        print(f"no second chance: pytest has not said what failed: {error}")
        return 1
    final = [failure for failure in failures if failure.final]
    for failure in final:
        print(f"no second chance: {failure.test}: {failure.final}")
    tests = [*dict.fromkeys(failure.test for failure in failures)]
    different = len({failure.text for failure in failures})
    if different > MOST:
        print(f"no second chance: {len(tests)} tests failed in {different} ways, more than {MOST}")
    if final or different > MOST:
        return 1
    for busy, how in TRIES:
        print(f"+ {len(tests)} failed tests {how}", flush=True)
        with _busy_programs(busy):
            if not _pass(tests):
                return 1
    for failure in failures:
        print(f"unreliable: {failure.test}\n{failure.text}\n")
    print(*(f"unreliable: {test}" for test in tests), sep="\n")
    return 0


def _read(file: Path) -> list[Failure]:
    failures = [Failure(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    if not failures:
        raise ValueError(f"{file} is empty")
    return failures


@contextlib.contextmanager
def _busy_programs(count: int) -> Iterator[None]:
    """Programs that compute, with the same priority as the tests, and in their session."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _pass(tests: Iterable[str]) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as names:
        names.write("".join(f"{test}\n" for test in tests))
        names.flush()
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", f"@{names.name}"]
        env = {name: value for name, value in os.environ.items() if name != FILE}
        return subprocess.run(command, env=env, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
