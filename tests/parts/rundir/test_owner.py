"""The controller of a run is identified with certainty: no other process is signalled, and no ended run is alive."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.errors import UsageError
from launcher.rundir.directory import RunDir
from launcher.rundir.owner import Controller, is_alive, parse_controller, this_process
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import wait_until

COVERS = ("launcher/rundir/owner.py", "launcher/rundir/control.py", "launcher/commands")


@contextmanager
def stranger() -> Iterator[tuple[subprocess.Popen[bytes], Controller]]:
    """An unrelated process, and its identity."""
    with subprocess.Popen(["sleep", "600"]) as process:
        started = psutil.Process(process.pid).create_time() - psutil.boot_time()
        try:
            yield process, replace(this_process(), pid=process.pid, started=started)
        finally:
            process.kill()


class TestControllerProcess:
    def test_a_controller_is_alive_until_its_process_ends(self) -> None:
        with stranger() as (process, controller):
            assert is_alive(controller)
            process.kill()
            process.wait(10)
            assert not is_alive(controller)

    def test_a_zombie_controller_is_not_alive(self) -> None:
        with stranger() as (process, controller):
            process.kill()
            wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "it is a zombie")
            assert not is_alive(controller)

    def test_a_controller_with_a_reused_pid_is_not_alive(self) -> None:
        with stranger() as (process, controller):
            earlier = replace(controller, started=controller.started - 1.0)
            assert not is_alive(earlier)
            assert process.poll() is None

    def test_a_controller_of_an_earlier_boot_is_not_alive(self) -> None:
        assert not is_alive(replace(this_process(), boot="2f6c1c6e-0000-4000-8000-000000000000"))

    def test_checking_a_controller_on_another_machine_raises_usage_error(self) -> None:
        with pytest.raises(UsageError, match="this run's controller is on gpu-a"):
            is_alive(replace(this_process(), host="gpu-a", boot="2f6c1c6e-0000-4000-8000-000000000000"))

    def test_checking_a_controller_in_another_container_raises_usage_error(self) -> None:
        elsewhere = replace(this_process(), pid_namespace="pid:[1]")
        with pytest.raises(UsageError, match=f"in another container on {socket.gethostname()}"):
            is_alive(elsewhere)

    def test_a_controller_is_alive_after_its_machine_was_renamed(self) -> None:
        assert is_alive(replace(this_process(), host="before-dhcp"))

    def test_the_identity_of_a_controller_round_trips_through_json(self) -> None:
        assert parse_controller(json.loads(json.dumps(asdict(this_process())))) == this_process()


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running run in the folder `run`."""
    with (folder / "stderr").open("wb") as stderr:
        command = distlaunch_command("local", "-n", "1", "--run-dir", "run", "--", "sh", "-c", "echo up; sleep 600")
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr)
    with process:
        try:
            assert process.stdout is not None
            assert b"up" in process.stdout.readline()
            yield process
        finally:
            process.terminate()
            process.wait(60)


def ask(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, *distlaunch_command(*arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def change(run: Path, **facts: Any) -> None:
    """Overwrites facts about the controller, for example so that the run seems to belong to another machine."""
    written = json.loads((run / "run.json").read_text())
    written["controller"] |= facts
    (run / "run.json").write_text(json.dumps(written))


@pytest.mark.slow
class TestRunOwner:
    def test_an_ended_run_is_over_even_if_another_process_locks_its_files(self, tmp_path: Path) -> None:
        assert ask(tmp_path, "local", "-n", "1", "--run-dir", "run", "--", "true").returncode == 0
        with (tmp_path / "run" / "run.json").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert RunDir(tmp_path / "run").read_run()[1] is None

    def test_a_running_run_is_alive_even_if_another_process_locks_its_files(self, tmp_path: Path) -> None:
        """Even while it begins: a foreign lock once made the run lose its own lock, so it counted as over."""
        script = (
            "import sys, time\nfrom pathlib import Path\nfrom launcher.rundir.directory import RunDir, RunStart\n"
            "with RunDir.create(Path(sys.argv[1])).hold(RunStart(run_id='x', name='x', started=0.0)):\n"
            "    print('held', flush=True)\n    time.sleep(600)\n"
        )
        folder = tmp_path / "run"
        with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE) as process:
            try:

                def lock() -> int:
                    assert (folder / "run.json").exists()
                    return os.open(folder / "run.json", os.O_RDONLY)

                looker = eventually(lock)
                fcntl.flock(looker, fcntl.LOCK_EX)
                assert process.stdout is not None
                assert process.stdout.readline() == b"held\n"
                os.close(looker)
                _, controller = RunDir(folder).read_run()
                assert controller is not None
                assert controller.pid == process.pid
            finally:
                process.kill()

    def test_a_run_is_over_once_its_controller_is_killed(self, tmp_path: Path) -> None:
        with running(tmp_path) as process:
            assert RunDir(tmp_path / "run").read_run()[1] is not None
            process.kill()
            process.wait()
            assert RunDir(tmp_path / "run").read_run()[1] is None
            assert ask(tmp_path, "down", "./run").stdout == f"Already ended: {tmp_path}/run\n"

    def test_commands_reject_a_run_on_another_machine_and_name_it(self, tmp_path: Path) -> None:
        with running(tmp_path) as process:
            change(tmp_path / "run", host="gpu-a", boot="2f6c1c6e-0000-4000-8000-000000000000")
            for command in ("down", "stacks", "clean", "profile"):
                asked = ask(tmp_path, command, "./run")
                assert (asked.returncode, asked.stdout) == (2, "")
                assert asked.stderr.startswith("Error: this run's controller is on gpu-a [usage]\n  run the command on")
            assert process.poll() is None

    def test_commands_spare_a_process_that_reuses_the_pid_of_a_controller(self, tmp_path: Path) -> None:
        assert ask(tmp_path, "local", "-n", "1", "--run-dir", "run", "--", "true").returncode == 0
        written = json.loads((tmp_path / "run" / "run.json").read_text())
        (tmp_path / "run" / "run.json").write_text(json.dumps({**written, "ended": False}))
        with stranger() as (process, controller):
            change(tmp_path / "run", pid=controller.pid)
            assert ask(tmp_path, "down", "./run").stdout == f"Already ended: {tmp_path}/run\n"
            assert "has ended" in ask(tmp_path, "stacks", "./run").stderr
            assert process.poll() is None

    def test_an_ended_run_of_another_machine_is_over(self, tmp_path: Path) -> None:
        assert ask(tmp_path, "local", "-n", "1", "--run-dir", "run", "--", "true").returncode == 0
        change(tmp_path / "run", host="gpu-a", boot="2f6c1c6e-0000-4000-8000-000000000000")
        assert ask(tmp_path, "down", "./run").stdout == f"Already ended: {tmp_path}/run\n"

    def test_a_run_is_not_stopped_from_another_pid_namespace(self, tmp_path: Path) -> None:
        apart = ("unshare", "--pid", "--fork", "--mount-proc")
        if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
            pytest.skip("only root can create a PID namespace")
        with running(tmp_path) as process:
            asked = ask(tmp_path, "down", "./run", before=apart)
            assert asked.returncode == 2
            assert asked.stderr.startswith("Error: this run's controller is in another container on ")
            assert process.poll() is None

    @pytest.mark.smoke
    def test_down_stops_a_run_by_its_folder(self, tmp_path: Path) -> None:
        with running(tmp_path) as process:
            assert ask(tmp_path, "down", "./run").stdout == f"Stopped: {tmp_path}/run\n"
            assert process.wait(10) == 143
