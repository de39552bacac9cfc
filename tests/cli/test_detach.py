"""A run in the background outlives its terminal, answers only its user, and survives any client."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.commands.requests import ask_status, ask_to_end
from launcher.errors import UsageError
from launcher.rundir.control import CLIENTS, NEW, NOT_KNOWN, PATH_LIMIT, AskStatus, ask
from launcher.rundir.directory import RunDir
from launcher.rundir.record import read_record
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import await_none_left, make_mark, wait_until

COVERS = (
    "launcher/controller/detach.py",
    "launcher/rundir/control.py",
    "launcher/rundir/owner.py",
    "launcher/commands",
    "launcher/cli",
)

UP = ("-n", "1", "--", "sh", "-c", "echo up; exec sleep 600")
NEVER_UP = ("-n", "2", "--", "sh", "-c", "exec sleep 600")
"""Two workers that never open their ports."""


def run_json(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return facts


def controller(folder: Path) -> psutil.Process:
    return psutil.Process(run_json(folder)["controller"]["pid"])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for a run; stops the run at the end of the test."""
    folder = tmp_path / "run"
    yield folder
    if (folder / "run.json").exists():
        with contextlib.suppress(UsageError):
            ask_to_end(RunDir(folder))


def detach(folder: Path, *arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = distlaunch_command("local", "--detach", "--run-dir", str(folder), *arguments)
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=90, **settings
    )


def begin(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a run in the background; returns the process that waits until it is up, once its tasks are started."""
    command = distlaunch_command("local", "--wait", "--run-dir", str(folder), *arguments)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    journal = folder / "events.jsonl"
    wait_until(lambda: journal.exists() and b"task-started" in journal.read_bytes(), "its tasks are started")
    return process


def connections(path: Path) -> int:
    """How many clients are connected to the socket at this path, or wait for it."""
    bound = path.with_suffix(NEW)  # the kernel keeps the name that it was bound to
    table = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(f" {bound}") for line in table) - 1  # the listening socket itself


class TestDetach:
    def test_detach_returns_when_the_cluster_is_up_and_prints_the_next_commands(self, folder: Path) -> None:
        mark = make_mark()
        done = detach(folder, *UP, env={**os.environ, **mark})
        assert done.returncode == 0
        assert done.stdout.splitlines()[-1] == str(folder)  # after the task's output so far
        assert f"distlaunch down {folder}" in done.stderr
        assert controller(folder).is_running()
        status = ask_status(RunDir(folder))
        assert (status.state, status.attempt) == ("running", 1)
        assert [(task.task, task.state) for task in status.tasks] == [("worker:0", "running")]
        assert ask_to_end(RunDir(folder))
        assert run_json(folder)["outcome"] == "interrupted"
        await_none_left(mark)

    def test_detach_reports_a_run_that_fails_during_startup_like_the_foreground(self, folder: Path) -> None:
        done = detach(
            folder, "-n", "2", "--", "sh", "-c", "test $DISTLAUNCH_TASK = worker:1 || exec sleep 60; echo no; exit 7"
        )
        assert done.returncode == 1
        assert done.stdout == "worker:1 │ no\n"
        assert "Error: worker:1 on local exited with status 7" in done.stderr
        assert "distlaunch down" not in done.stderr

    def test_detach_reports_a_missing_script_as_a_usage_error(self, folder: Path) -> None:
        done = detach(folder, "nowhere.py")
        assert done.returncode == 2
        assert "nowhere.py" in done.stderr

    def test_detach_returns_with_a_note_if_the_tasks_form_no_cluster(self, folder: Path) -> None:
        done = detach(folder, *NEVER_UP)
        assert done.returncode == 0
        assert "The tasks run, but have not imported TensorFlow; the run continues in the background\n" in done.stderr
        assert ask_status(RunDir(folder)).state == "forming"

    def test_detach_with_wait_reports_why_the_cluster_did_not_form(self, folder: Path) -> None:
        done = detach(folder, "--wait", "--set", "timeouts.start_s=3", *NEVER_UP)
        assert done.returncode == 3
        assert "the run continues in the background" not in done.stderr
        assert "[start-timeout]" in done.stderr

    def test_ctrl_c_during_wait_stops_the_background_run(self, folder: Path) -> None:
        with begin(folder, *NEVER_UP) as process:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert run_json(folder)["outcome"] == "interrupted"

    def test_a_background_run_survives_sigkill_of_the_waiting_command(self, folder: Path) -> None:
        with begin(folder, *NEVER_UP) as process:
            process.kill()
        assert ask_status(RunDir(folder)).state == "forming"
        assert ask_to_end(RunDir(folder), now=True)
        assert run_json(folder)["exit_status"] == 143

    @pytest.mark.slow
    def test_a_background_run_survives_the_end_of_its_terminal_during_startup(self, folder: Path) -> None:
        """The terminal is closed while the cluster forms, when the controller still writes to it."""
        terminal, end = pty.openpty()
        command = distlaunch_command("local", "--wait", "--run-dir", str(folder), *NEVER_UP)
        session = (
            "import fcntl, os, sys, termios\nos.setsid()\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "os.execv(sys.argv[1], sys.argv[1:])\n"
        )
        with subprocess.Popen([sys.executable, "-c", session, *command], stdin=end, stdout=end, stderr=end) as process:
            os.close(end)
            journal = folder / "events.jsonl"
            wait_until(lambda: journal.exists() and b"task-started" in journal.read_bytes(), "its tasks are started")
            os.close(terminal)
            assert process.wait(30) == -signal.SIGHUP
        process_now = controller(folder)
        os.kill(process_now.pid, signal.SIGHUP)
        assert ask_status(RunDir(folder)).state == "forming"
        wait_until(lambda: re.search(rb"Forming, \d+ s", journal.read_bytes()) is not None, "it continues and says so")
        assert process_now.is_running()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A run that several tests share."""
    folder = tmp_path_factory.mktemp("controller") / ("long" * 20) / "run"
    assert detach(folder, *UP).returncode == 0
    yield RunDir(folder)
    ask_to_end(RunDir(folder))


class TestController:
    def connect(self, up: RunDir) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(20)
        client.connect(read_record(up).socket)
        return client

    def test_the_control_socket_is_private_and_has_a_short_path(self, up: RunDir) -> None:
        path = Path(read_record(up).socket)
        assert len(os.fsencode(path)) <= PATH_LIMIT < len(os.fsencode(up.root))
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    @pytest.mark.parametrize(
        "garbage",
        [b"\0" * 70_000, b"{}\n", b'{"type": "AskStop"}\n', b'{"type": "Stop", "grace_s": 0}\n', b"GET / HTTP\n"],
    )
    def test_the_controller_refuses_and_disconnects_clients_that_send_garbage_and_keeps_serving(
        self, up: RunDir, garbage: bytes
    ) -> None:
        with self.connect(up) as client, contextlib.suppress(OSError):
            client.sendall(garbage)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert answer.endswith(NOT_KNOWN.encode())
        assert ask_status(up).state == "running"

    def test_silent_clients_do_not_block_the_controller(self, up: RunDir) -> None:
        with contextlib.ExitStack() as clients:
            for _ in range(CLIENTS - 2):  # the thread of an earlier client may not have ended yet
                clients.enter_context(self.connect(up))
            assert ask_status(up).state == "running"
            for _ in range(2):
                clients.enter_context(self.connect(up))
            one_too_many = clients.enter_context(self.connect(up))
            assert one_too_many.recv(1) == b""
        wait_until(lambda: self._answers(up), "there is room again")

    def _answers(self, up: RunDir) -> bool:
        with contextlib.suppress(UsageError):
            return ask_status(up).state == "running"
        return False

    def test_the_controller_rejects_connections_of_other_users(self, up: RunDir) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        path = read_record(up).socket
        script = (
            "import os, socket, sys\n"
            "here = os.open(os.path.dirname(sys.argv[1]), os.O_PATH); os.fchdir(here)\n"
            "os.setgroups([]); os.setresgid(65534, 65534, 65534)\n"
            "client = socket.socket(socket.AF_UNIX); os.chmod(os.path.basename(sys.argv[1]), 0o666)\n"
            "os.setresuid(65534, 65534, 65534)\n"
            "client.connect(os.path.basename(sys.argv[1]))\n"
            "try:\n    client.sendall(sys.argv[2].encode()); print(client.recv(10))\n"
            "except (BrokenPipeError, ConnectionResetError):\n    print(b'')\n"
        )
        mode = Path(path).parent.stat().st_mode & 0o777
        Path(path).parent.chmod(0o711)  # as if the folder were open
        try:
            command = [sys.executable, "-c", script, path, '{"type": "AskStatus"}\n']
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            Path(path).parent.chmod(mode)
            Path(path).chmod(0o600)
        assert done.stdout == "b''\n", done.stderr

    def test_a_client_rejects_a_control_socket_of_another_process(self, up: RunDir, tmp_path: Path) -> None:
        impostor = tmp_path / "socket"
        script = (
            "import socket, sys\nserver = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen()\n"
            "print(flush=True)\nserver.accept()[0].recv(100)\n"
        )
        with subprocess.Popen([sys.executable, "-c", script, str(impostor)], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                with pytest.raises(PermissionError, match="belongs to another process"):
                    ask(str(impostor), run_json(up.root)["controller"]["pid"], AskStatus(), 5.0)
            finally:
                process.kill()

    @pytest.mark.slow
    def test_stacks_reports_a_task_without_a_python_stack(self, up: RunDir) -> None:
        done = subprocess.run(
            distlaunch_command("stacks", str(up.root)), capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, "worker:0 has no Python stack to show\n")
        done = subprocess.run(
            distlaunch_command("stacks", "--json", str(up.root)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert json.loads(done.stdout) == {"stacks": "worker:0 has no Python stack to show\n"}


def test_two_clients_that_stop_a_run_concurrently_both_see_it_end(folder: Path) -> None:
    assert detach(folder, *UP).returncode == 0
    process = controller(folder)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask_to_end, RunDir(folder)) for _ in range(2)]
        ended = [each.result() for each in asked]
    assert any(ended)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_down_all_stops_every_running_run(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    runs = tmp_path / "distlaunch" / "runs"
    for _ in range(2):
        command = distlaunch_command("local", "-d", *UP)
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        assert Path(runs, done.stdout.splitlines()[-1]).is_dir()
    ended = subprocess.run(distlaunch_command("down", "--all"), env=env, capture_output=True, text=True, check=True)
    assert sorted(ended.stdout.splitlines()) == sorted(f"Stopped: {folder.name}" for folder in runs.iterdir())
    shown = subprocess.run(
        distlaunch_command("down", "--json", str(next(runs.iterdir()))),
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["stopped"] is False
    again = subprocess.run(distlaunch_command("down", "--all"), env=env, capture_output=True, text=True, check=True)
    assert (again.stdout, again.stderr) == ("", "No run is running\n")


@pytest.mark.slow
def test_a_killed_controller_is_detected_and_the_next_run_removes_its_socket(folder: Path) -> None:
    mark = make_mark()
    assert detach(folder, *UP, env={**os.environ, **mark}).returncode == 0
    path = Path(read_record(RunDir(folder)).socket)
    process = controller(folder)
    process.suspend()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_status, RunDir(folder))
        wait_until(lambda: connections(path) == 1, "the request waits for an answer")
        process.kill()  # its connections are closed before the process is gone
        with pytest.raises(UsageError, match="has ended"):
            asked.result(30)
    with pytest.raises(UsageError, match="has ended"):
        ask_status(RunDir(folder))
    assert not ask_to_end(RunDir(folder))
    await_none_left(mark)
    assert path.exists()
    other = folder.parent / "other"
    assert detach(other, *UP).returncode == 0
    try:
        assert not path.exists()
    finally:
        ask_to_end(RunDir(other))


@pytest.mark.slow
def test_a_full_disk_fails_the_run_and_is_recorded_in_run_json(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=False).returncode != 0:
        pytest.skip("only root can make a small disk")
    try:
        script = "echo up; sleep 2; while :; do head -c 4000 /dev/zero | tr '\\0' x || exit 1; done"
        assert detach(disk / "run", "-n", "1", "--", "sh", "-c", script).returncode == 0
        wait_until(lambda: run_json(disk / "run")["ended"], "the run has ended")
        assert (run_json(disk / "run")["outcome"], run_json(disk / "run")["reference"]) == ("failed", "disk-full")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
