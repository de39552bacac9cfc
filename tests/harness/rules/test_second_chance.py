"""A test that fails now and then is printed as unreliable; a failure that shows a defect fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.cases import first_quick
from tests.harness.places import ROOT
from tests.harness.rules.second_chance import FILE, NoSecondChanceError, assert_same_bytes

COVERS = ("tests/harness/rules/second_chance.py",)

HEAD = """
import os, socket, subprocess, sys, threading
from pathlib import Path
import pytest
from tests.harness.rules.second_chance import assert_same_bytes
from tests.harness.witness import assert_none_left, make_mark

def times(name):
    '''How often this was called, over all runs of pytest.'''
    with open(name, "a") as stream:
        stream.write(".")
    return len(Path(name).read_text())

def start(*command, **options):
    return subprocess.run([sys.executable, *command], **options)
"""


@dataclass(frozen=True)
class Suite:
    """A folder with one module of tests, and the file in which its failures are noted."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        options = "-p tests.harness.rules.second_chance -p no:cacheprovider -q"
        return {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": options, FILE: str(self.folder / "failed")}

    def run(self, source: str, *options: str) -> int:
        """Runs the tests; returns pytest's exit status."""
        (self.folder / "test_it.py").write_text(HEAD + source)
        (self.folder / "pytest.ini").touch()
        command = [sys.executable, "-m", "pytest", *options]
        return subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, check=False).returncode

    def run_again(self) -> tuple[int, str]:
        command = [sys.executable, "-m", "tests.harness.rules.second_chance", str(self.folder / "failed")]
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


FAILS_ONCE = """
def test_quiet():
    pass

def test_slow_start():
    start("-c", "")
    assert times("first") > 1, "not ready yet"
"""


@pytest.mark.parametrize(
    "options", first_quick([pytest.param(("-n", "2"), id="xdist"), pytest.param(("-n", "0"), id="alone")])
)
def test_a_failure_that_does_not_repeat_is_printed_and_passes(suite: Suite, options: tuple[str, ...]) -> None:
    assert suite.run(FAILS_ONCE, *options) == 1
    status, said = suite.run_again()
    assert status == 0, said
    assert said.endswith("unreliable: test_it.py::test_slow_start\n")
    assert "AssertionError: not ready yet" in said  # the first failure
    assert len((suite.folder / "first").read_text()) == 4  # alone, and twice beside busy programs


@pytest.mark.parametrize("again", first_quick([4, 2, 3]))
def test_a_failure_that_repeats_in_any_of_three_runs_fails(suite: Suite, again: int) -> None:
    source = f"""
def test_race():
    start("-c", "")
    assert times("first") not in (1, {again})
"""
    assert suite.run(source, "-n", "0") == 1
    status, said = suite.run_again()
    assert status == 1
    assert "unreliable" not in said


FINAL = {
    "a test that is alone": ("def test_it(): assert times('a') > 1", "no other process, thread or connection"),
    "a process that is left": (
        """
def test_it():
    mark = make_mark()
    left = subprocess.Popen(["sleep", "600"], env={**os.environ, **mark})
    try:
        assert times("a") > 1 or assert_none_left(mark)
    finally:
        left.kill()
        left.wait()
""",
        "processes are left behind",
    ),
    "a lost byte": (
        "def test_it():\n    start('-c', '')\n    assert_same_bytes(b'ab' if times('a') > 1 else b'a', b'ab')",
        "1 bytes instead of 2, different from byte 1 on",
    ),
    "exit status 70": (
        "def test_it():\n    start('-c', '')\n    assert times('a') > 1, 'Error: a bug in distlaunch: KeyError()'",
        "distlaunch has reported a bug of its own",
    ),
    "exit status 70 without a word": (
        """
def test_it():
    status = 70 if times("a") == 1 else 0
    assert start("-c", f"exit({status})").returncode == 0
""",
        "distlaunch has reported a bug of its own",
    ),
    "a crash of pytest": ("def test_it():\n    start('-c', '')\n    times('a') > 1 or os._exit(3)", "has crashed"),
}


@pytest.mark.parametrize("kind", first_quick(FINAL))
def test_some_failures_have_no_second_chance(suite: Suite, kind: str) -> None:
    source, reason = FINAL[kind]
    assert suite.run(source, "-n", "1") == 1
    status, said = suite.run_again()
    assert status == 1
    assert said.startswith("no second chance: test_it.py::test_it: ")
    assert reason in said
    assert (suite.folder / "a").read_text() == "."  # it did not run again


@pytest.mark.slow
def test_a_fixture_that_starts_something_disturbs_all_tests_that_use_it(suite: Suite) -> None:
    source = """
@pytest.fixture(scope="module")
def service():
    start("-c", "")

def test_first(service): pass
def test_second(service): assert times("second") > 1
"""
    assert suite.run(source, "-n", "0") == 1
    status, said = suite.run_again()
    assert status == 0, said


@pytest.mark.slow
def test_tests_that_share_what_one_of_them_has_started_get_a_second_chance_together(suite: Suite) -> None:
    source = """
@pytest.fixture(scope="module")
def runs():
    return {}

@pytest.mark.parametrize("n", range(30))
def test_it(runs, n):
    if not runs:
        start("-c", "")
        runs["works"] = times("runs") > 1
    if not runs["works"]:
        pytest.fail("the run has failed", pytrace=False)
"""
    assert suite.run(source, "-n", "0") == 1
    status, said = suite.run_again()
    assert status == 0, said


@pytest.mark.slow
def test_a_fixture_that_starts_something_disturbs_no_test_whose_fixture_only_has_its_name(suite: Suite) -> None:
    source = """
class TestOne:
    @pytest.fixture
    def folder(self):
        start("-c", "")

    def test_first(self, folder): pass

class TestOther:
    @pytest.fixture
    def folder(self): pass

    def test_second(self, folder): assert times("second") > 1
"""
    assert suite.run(source, "-n", "0") == 1
    status, said = suite.run_again()
    assert status == 1
    assert said.startswith("no second chance: test_it.py::TestOther::test_second: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    ["threading.Thread(target=print).start()", "socket.socket().bind(('127.0.0.1', 0))", "os.fork() or os._exit(0)"],
)
def test_threads_sockets_and_forks_disturb_as_well(suite: Suite, what: str) -> None:
    assert suite.run(f"def test_it():\n    {what}\n    assert times('a') > 1\n", "-n", "0") == 1
    assert suite.run_again()[0] == 0


@pytest.mark.parametrize("noted", [None, "", "no JSON\n", '{"test": "a"}\n'])
def test_a_run_that_does_not_say_what_failed_fails(suite: Suite, noted: str | None) -> None:
    if noted is not None:
        (suite.folder / "failed").write_text(noted)
    status, said = suite.run_again()
    assert status == 1
    assert said.startswith("no second chance: pytest has not said what failed")


@pytest.mark.slow
def test_many_failures_are_not_repeated(suite: Suite) -> None:
    source = """
@pytest.mark.parametrize("n", range(30))
def test_it(n):
    start("-c", "")
    assert times("a") > 30
"""
    assert suite.run(source, "-n", "0") == 1
    status, said = suite.run_again()
    assert status == 1
    assert "30 tests failed in 30 ways" in said


def test_a_difference_of_bytes_is_shown_where_it_begins() -> None:
    with pytest.raises(NoSecondChanceError, match=r"^6 bytes instead of 4, different from byte 2 on"):
        assert_same_bytes(b"abXXcd", b"abcd")
