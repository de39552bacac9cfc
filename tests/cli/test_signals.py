"""From the first moment of a run, no signal costs the run its report or takes the signal's default action."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.signals import Interruption, Interrupts
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import assert_none_left, make_mark, wait_until

COVERS = ("launcher/signals.py", "launcher/controller/launch.py", "launcher/cli")

pytestmark = pytest.mark.slow

STORM = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def report_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return loaded


@contextmanager
def started(folder: Path, *command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command whose run is in `run`; yields its process as soon as the run is visible to other commands."""
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=stderr
        )
    with process:
        try:
            while not (folder / "run" / "run.json").exists():
                assert process.poll() is None, (folder / "stderr").read_text()
            yield process
        finally:
            process.kill()


class TestSignalsDuringHashing:
    @pytest.fixture
    def spec(self, tmp_path: Path) -> str:
        """A spec whose folder takes forever to hash: it has a file of 1 TiB that takes no space on the disk."""
        (tmp_path / "project").mkdir()
        with (tmp_path / "project" / "data").open("wb") as file:
            file.truncate(1 << 40)
        path = tmp_path / "spec.yaml"
        path.write_text(
            "nodes: [{host: gpu-a, ssh: {hostname: 127.0.0.1, port: 9}}]\n"
            "program: {command: ['true']}\nsync: {path: project, to: ~/project}\n"
        )
        return str(path)

    @pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_while_the_sync_folder_is_hashed_is_reported_as_interruption(
        self, spec: str, tmp_path: Path, signum: int, status: int
    ) -> None:
        with started(tmp_path, *distlaunch_command("up", "--run-dir", "run", spec)) as process:
            process.send_signal(signum)
            assert process.wait(30) == status
        report = report_of(tmp_path)
        assert (report["outcome"], report["exit_status"], report["attempts"]) == ("interrupted", status, [])
        assert report["verdict"]["reference"] == "interrupted"
        assert "nothing was started [interrupted]" in (tmp_path / "stderr").read_text()

    def test_sigusr1_does_not_end_a_run_that_has_just_become_visible(self, spec: str, tmp_path: Path) -> None:
        with started(tmp_path, *distlaunch_command("up", "--run-dir", "run", spec)) as process:
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda: "Starting 1 task" in (tmp_path / "stderr").read_text(), "the run continues")
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 143


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    installed = Interrupts()
    installed.install()
    yield installed
    installed.restore()


@pytest.mark.smoke
def test_an_interruption_turned_into_another_exception_is_still_raised(interrupts: Interrupts) -> None:
    """Seen once: SIGUSR1 right after SIGTERM, and Python's SystemError, as if it were a bug in distlaunch."""

    @interrupts.raising()
    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Interruption as interruption:
            raise SystemError("<method 'append'> returned a result with an exception set") from interruption

    with pytest.raises(Interruption) as raised:
        work()
    assert raised.value.signum == signal.SIGTERM


@pytest.mark.smoke
def test_an_exception_without_an_interruption_is_raised_unchanged(interrupts: Interrupts) -> None:
    with pytest.raises(Interruption), interrupts.raising():
        signal.raise_signal(signal.SIGHUP)
    interrupts.deliver_to(lambda _signum, _is_request: None)

    @interrupts.raising()
    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        raise KeyError

    with pytest.raises(KeyError):
        work()


def test_an_interruption_that_python_ignored_is_raised_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python ignores exceptions, for example, in the weak-reference callback that every import creates."""
    monkeypatch.setattr("launcher.signals.LOST_S", 0.1)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    caught = Interrupts()

    @caught.raising()
    def work() -> None:
        Finalized()
        time.sleep(30)

    caught.install()
    try:
        with pytest.raises(Interruption):
            work()
        assert caught.asked == signal.SIGTERM
        time.sleep(0.3)  # nothing is raised after the work
    finally:
        caught.restore()


def test_an_interrupted_check_leaves_no_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "data").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "spec.yaml").write_text(
        "nodes: [{host: gpu-a, ssh: {hostname: 127.0.0.1, port: 9}}]\n"
        "program: {command: ['true']}\nsync: {path: ., to: ~/project}\n"
    )
    process = subprocess.Popen(
        distlaunch_command("check", "spec.yaml"),
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.DEVNULL,
    )
    with process:
        wait_until(lambda: any((tmp_path / "tmp").iterdir()), "the check has its folder")
        process.terminate()
        assert process.wait(30) == 143
    assert [*(tmp_path / "tmp").iterdir()] == []


@pytest.mark.parametrize(
    ("moment", "seconds"), [("run.json", "600"), ("attempt-1/worker-0.log", "600"), ("report.json", "0")]
)
def test_repeated_signals_prevent_neither_the_report_nor_its_exit_status(
    tmp_path: Path, moment: str, seconds: str
) -> None:
    mark = make_mark()
    command = distlaunch_command("local", "-n", "2", "--run-dir", "run", "--", "sleep", seconds)
    with started(tmp_path, *command, env=mark) as process:
        wait_until((tmp_path / "run" / moment).exists, f"{moment} exists")
        storm = itertools.cycle(STORM)

        def ended() -> None:
            process.send_signal(next(storm))
            assert process.poll() is not None

        eventually(ended)
        report = report_of(tmp_path)
        assert report["outcome"] == ("succeeded" if seconds == "0" else "interrupted")
        assert process.returncode == report["exit_status"]
    assert_none_left(mark)


@pytest.mark.smoke
def test_nohup_protects_a_run_from_sighup(tmp_path: Path) -> None:
    command = distlaunch_command(
        "local", "-n", "1", "--run-dir", "run", "--", "sh", "-c", "while :; do sleep 0.1; done"
    )
    with started(tmp_path, "nohup", *command) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
