"""`distlaunch attach`: the last screenful, new output, how it ends, and that leaving changes nothing."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.builders.run_folders import RunFolder
from tests.harness.polling import eventually
from tests.harness.processes.background import BackgroundRun
from tests.harness.processes.commands import distlaunch_command

COVERS = (
    "launcher/console",
    "launcher/commands",
    "launcher/rundir/follow.py",
)

T = 1_700_000_000.0
ROWS = 10


class Viewer:
    """`distlaunch attach` on its own terminal."""

    def __init__(self, run: Path, *options: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, 100, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            distlaunch_command("attach", str(run), *options),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
        )
        self._slave = slave
        os.set_blocking(self._master, False)
        self._text = b""

    @property
    def text(self) -> str:
        try:
            while data := os.read(self._master, 65_536):
                self._text += data
        except BlockingIOError:
            pass
        return self._text.decode()

    def shows(self, text: str) -> None:
        def check() -> None:
            assert text in self.text

        eventually(check)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        status = self.process.wait(30)
        assert termios.tcgetattr(self._slave) == self.before
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)


@pytest.fixture
def running(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run", running=True)
    run.write("worker:0", [(T + 1, "hello from 0")])
    run.write("worker:1", [(T + 2, "hello from 1")])
    run.say(T, "Starting")
    return run


@pytest.fixture
def viewer(running: RunFolder) -> Iterator[Viewer]:
    viewer = Viewer(running.root)
    yield viewer
    viewer.close()


def attach(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        distlaunch_command("attach", str(run), *options),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_attach_shows_earlier_output_in_order_and_then_new_output(running: RunFolder, viewer: Viewer) -> None:
    viewer.shows("hello from 1")
    order = [viewer.text.index(text) for text in ("Starting", "worker:0 │ hello from 0", "worker:1 │ hello from 1")]
    assert order == sorted(order)
    running.write("worker:1", [(T + 3, "more"), (T + 4, b"step 7 of 10")])
    viewer.shows("worker:1 │ more")
    viewer.shows("step 7 of 10")  # without a line break
    running.say(T + 5, "\x1b[2Jslow", level="warning")
    viewer.shows("Warning: ␛[2Jslow")
    running.write("worker:0", [(T + 6, "again")], attempt=2)
    viewer.shows("worker:0 │ again")
    running.write("worker:0", [(T + 7, "the end")], attempt=2)
    running.say(T + 8, "Failed")
    running.note(ended=True, exit_status=3)
    assert viewer.end() == 3
    viewer.shows("the end")
    viewer.shows("Failed")
    assert viewer.text.count("hello from 0") == 1


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_leaving_attach_prints_a_note_that_the_run_continues(running: RunFolder, viewer: Viewer, key: bytes) -> None:
    viewer.shows("hello from 1")
    viewer.type(b"x")  # no other key does anything
    running.say(T + 3, "still here")
    viewer.shows("still here")
    viewer.type(key)
    assert viewer.end() == 0
    viewer.shows("Detached; the run continues")


def test_attach_restores_the_terminal_after_sigterm(viewer: Viewer) -> None:
    viewer.shows("hello from 1")
    viewer.process.send_signal(signal.SIGTERM)
    assert viewer.end() == 143


def test_sigterm_during_the_import_of_the_live_view_ends_attach(
    running: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Sender:\n"
        "    def __set_name__(self, owner, name):\n"  # where Python turns an exception into a RuntimeError
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'launcher.console.live_view':\n"
        "            type('Owner', (), {'sender': Sender()})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    viewer = Viewer(running.root)
    try:
        assert viewer.end() == 143, viewer.text
    finally:
        viewer.close()


@pytest.mark.slow
def test_attach_shows_only_the_last_screenful_of_earlier_output(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.note(ended=True, exit_status=1)
    chatter = "2026-11-21 12:00:00.000000: I tensorflow/core/platform/cpu_feature_guard.cc:210] optimized"
    run.write("worker:0", [(T + n, f"a{n}") for n in range(0, 100_000, 2)])
    run.write("worker:1", [(T + n, f"b{n}") for n in range(1, 100_000, 2)] + [(T + 100_001, chatter)] * 5)
    run.say(T + 99_996.5, "in between")
    viewer = Viewer(run.root)
    try:
        assert viewer.end() == 1
        viewer.shows("b99999")
        shown = viewer.text.split("\r\n")
        assert len(shown) == ROWS  # the last one is empty, for the cursor
        assert shown[-5:] == ["in between", "worker:1 │ b99997", "worker:0 │ a99998", "worker:1 │ b99999", ""]
    finally:
        viewer.close()
    assert "optimized" in attach(run.root, "-v").stdout


def test_attach_ends_with_the_exit_status_of_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert attach(run.root).returncode == 0
    (run.root / "report.json").write_text('{"exit_status": 1, "outcome": "failed", "ended": 1.0}')
    assert attach(run.root).returncode == 1
    run.note(ended=True, exit_status=70)
    assert attach(run.root).returncode == 70


def test_attach_reports_a_run_without_a_controller_as_lost(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    run.write("worker:0", [(T, "last words")])
    gone = subprocess.Popen(["true"])
    gone.wait()
    run.note(ended=False, pid=gone.pid)
    ended = attach(run.root)
    assert ended.returncode == 3
    assert ended.stdout == "worker:0 │ last words\n"
    assert "the controller of" in ended.stderr


def test_attach_waits_for_a_run_without_started_tasks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", running=True)
    process = subprocess.Popen(
        distlaunch_command("attach", str(run.root)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run.say(T, "Starting")
    run.write("worker:0", [(T, "first")])
    run.note(ended=True, exit_status=0)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (0, "worker:0 │ first\n", "Starting\n")


@pytest.mark.slow
def test_a_stuck_attach_does_not_disturb_other_viewers_of_a_restart(tmp_path: Path) -> None:
    go = tmp_path / "go"
    program = f"echo $DISTLAUNCH_ATTEMPT.1; until [ -e {go} ]; do sleep 0.05; done; echo $DISTLAUNCH_ATTEMPT.2; exit 3"
    with (tmp_path / "console").open("wb") as console:
        run = BackgroundRun(
            tmp_path,
            "local",
            ["-n", "2", "--max-restarts", "1", "--", "sh", "-c", program],
            lambda command, stderr: subprocess.Popen(command, stdout=console, stderr=stderr),
        )

    def exists() -> None:
        assert (run.directory / "run.json").exists()

    eventually(exists)
    viewers = []
    for number in range(2):
        with (tmp_path / f"viewer-{number}").open("wb") as output:
            viewers.append(
                subprocess.Popen(
                    distlaunch_command("attach", str(run.directory)), stdout=output, stderr=subprocess.DEVNULL
                )
            )
    stuck = subprocess.Popen(distlaunch_command("attach", str(run.directory)), stdout=subprocess.PIPE)
    stuck.send_signal(signal.SIGSTOP)

    def all_look() -> None:
        assert all("1.1" in (tmp_path / f"viewer-{number}").read_text() for number in range(2))

    eventually(all_look)
    go.touch()
    assert run.end() == 1
    stuck.kill()
    stuck.communicate()
    for number, viewer in enumerate(viewers):
        assert viewer.wait(30) == 1
        shown = sorted(line for line in (tmp_path / f"viewer-{number}").read_text().splitlines() if " │ " in line)
        assert shown == sorted(
            f"worker:{task} │ {line.decode()}"
            for attempt in (1, 2)
            for task in (0, 1)
            for line in run.log(task, attempt).splitlines()
        )


def test_attach_imports_nothing_slow_before_its_first_line(running: RunFolder) -> None:
    code = (
        "import sys; sys.argv = ['distlaunch', 'attach', sys.argv[1]]\n"
        "import launcher.commands.logs as copy\n"
        "def write(descriptor, data): sys.exit(','.join(sys.modules))\n"
        "copy.write_all = write\n"
        "from launcher.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(running.root)], capture_output=True, text=True, check=False)
    modules = set(done.stderr.strip().split(","))
    assert "launcher.commands.attach" in modules
    assert not modules & {"pydantic", "rich", "psutil", "yaml", "paramiko", "tensorflow"}
