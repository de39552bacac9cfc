"""The files of a run are private to the user, are written atomically, and never overwrite those of another run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.errors import EXIT_INFRASTRUCTURE, RunDirectoryError
from launcher.rundir.directory import RunDir
from launcher.rundir.log_tails import TAIL_BYTES, find_size, last_lines
from launcher.rundir.names import make_run_id, runs_directory
from launcher.tasks import TaskId
from tests.harness.apart import linux
from tests.harness.processes.commands import Distlaunch

W0 = TaskId("worker", 0)
HINT = "choose another folder with --run-dir"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refusal(root: Path) -> RunDirectoryError:
    with pytest.raises(RunDirectoryError) as caught:
        RunDir.create(root)
    return caught.value


class TestRunsDirectory:
    def test_the_runs_directory_is_in_xdg_state_home(self) -> None:
        assert runs_directory({"XDG_STATE_HOME": "/state"}) == Path("/state/distlaunch/runs")

    @pytest.mark.parametrize("environ", [{}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "not/absolute"}])
    def test_the_runs_directory_is_in_home_if_xdg_state_home_is_unusable(
        self, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/home/someone")

        assert runs_directory(environ) == Path("/home/someone/.local/state/distlaunch/runs")

    def test_run_ids_of_the_same_second_differ(self) -> None:
        ids = {make_run_id("two-nodes") for _ in range(20)}

        assert len(ids) > 10
        assert all(re.fullmatch(r"\d{8}-\d{6}-two-nodes-[0-9a-f]{4}", run_id) for run_id in ids)

    def test_a_relative_run_directory_stays_valid_after_chdir(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        files = RunDir.create(Path("runs/first"))
        monkeypatch.chdir("/")
        files.write_text(files.spec, "here")

        assert (tmp_path / "runs" / "first" / "spec.json").read_text() == "here"

    def test_the_path_of_a_log_names_its_attempt_and_task(self, tmp_path: Path) -> None:
        files = RunDir.create(tmp_path / "run")

        assert files.relative(files.log(2, W0)) == "attempt-2/worker-0.log"


class TestPermissions:
    def test_the_run_directory_and_its_files_are_private_to_the_user(self, tmp_path: Path) -> None:
        files = RunDir.create(tmp_path / "new" / "run")
        previous = os.umask(0)
        try:
            files.write_text(files.spec, "secret")
        finally:
            os.umask(previous)

        assert (mode(files.root), mode(files.root.parent), mode(files.spec)) == (0o700, 0o700, 0o600)

    def test_an_existing_empty_run_directory_becomes_private(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir(mode=0o755)

        assert mode(RunDir.create(tmp_path / "run").root) == 0o700

    def test_permissions_of_existing_parent_folders_do_not_change(self, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine").chmod(0o755)

        RunDir.create(tmp_path / "mine" / "run")

        assert mode(tmp_path / "mine") == 0o755

    def test_every_file_of_a_real_run_is_private_despite_umask_zero(self, distlaunch: Distlaunch) -> None:
        ran = distlaunch("local", "-n", "1", "--", "sh", "-c", "umask 0; echo hello")

        assert ran.status == 0
        found = {path.relative_to(ran.directory).as_posix(): mode(path) for path in ran.directory.rglob("*")}
        assert found.keys() >= {"spec.json", "plan.json", "report.json", "attempt-1", "attempt-1/worker-0.log"}
        assert {name: bits for name, bits in found.items() if bits & 0o077} == {}


class TestWriting:
    def test_a_file_of_a_run_is_replaced_atomically(self, tmp_path: Path) -> None:
        files = RunDir.create(tmp_path / "run")
        versions = ["a" * 300_000, "b" * 300_000]
        files.write_text(files.report, versions[0])
        done = threading.Event()
        seen: set[str] = set()

        def read() -> None:
            while not done.is_set():
                text = files.report.read_text()
                seen.add(text if text in versions else f"{len(text)} characters of {set(text)}")

        reader = threading.Thread(target=read)
        reader.start()
        for turn in range(100):
            files.write_text(files.report, versions[turn % 2])
        done.set()
        reader.join()

        assert seen == {*versions}

    def test_a_failed_write_keeps_only_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_space(_: int) -> None:
            raise OSError(28, "No space left on device")

        files = RunDir.create(tmp_path / "run")
        files.write_text(files.report, "old")
        monkeypatch.setattr(os, "fsync", no_space)

        with pytest.raises(RunDirectoryError, match=r"cannot write .*/report\.json: No space left on device"):
            files.write_text(files.report, "new")

        assert [path.name for path in files.root.iterdir()] == ["report.json"]
        assert files.report.read_text() == "old"

    def test_json_files_are_written_as_readable_utf_8(self, tmp_path: Path) -> None:
        files = RunDir.create(tmp_path / "run")

        files.write_json(files.plan, {"name": "café", "list": [1]})

        assert "café" in files.plan.read_text(encoding="utf-8")
        assert json.loads(files.plan.read_bytes()) == {"name": "café", "list": [1]}

    def test_writing_into_a_removed_folder_raises_run_directory_error(self, tmp_path: Path) -> None:
        files = RunDir.create(tmp_path / "run")
        files.root.rmdir()
        files.root.write_text("a file is in its place")

        with pytest.raises(RunDirectoryError) as caught:
            files.write_text(files.report, "text")

        assert caught.value.message == f"cannot write {files.report}: Not a directory"

    def test_a_failed_write_of_stacks_returns_its_error_instead_of_raising(self, tmp_path: Path) -> None:
        files = RunDir.create(tmp_path / "run")
        assert files.write_stacks("text") == ""
        files.stacks.unlink()
        files.stacks.mkdir()

        assert files.write_stacks("text") == f"cannot write {files.stacks}: Is a directory"

    def test_a_checkpoint_folder_blocked_by_a_file_raises_run_directory_error(self, tmp_path: Path) -> None:
        files = RunDir.create(tmp_path / "run")
        files.checkpoints.write_text("a file is in its place")

        with pytest.raises(RunDirectoryError, match=r"cannot write .*/checkpoints: "):
            files.make_checkpoints()


class TestRejectedFolders:
    def test_a_run_directory_that_is_not_empty_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").touch()

        error = refusal(tmp_path)

        assert error.message == f"the run directory {tmp_path} is not empty"
        assert error.hint == "choose a new folder; each run needs its own"
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_run_directory_that_is_a_file_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()

        error = refusal(tmp_path / "file")

        assert (error.message, error.hint) == (f"cannot write {tmp_path}/file: {tmp_path}/file is not a folder", HINT)

    def test_a_run_directory_below_a_file_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()

        error = refusal(tmp_path / "file" / "runs" / "run")

        assert error.message == f"cannot write {tmp_path}/file/runs/run: {tmp_path}/file is not a folder"

    def test_a_run_directory_that_is_a_dangling_link_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("/nowhere/at/all")

        assert refusal(tmp_path / "link").message == f"cannot write {tmp_path}/link: {tmp_path}/link is not a folder"

    def test_a_run_directory_with_a_too_long_name_is_rejected(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / ("x" * 300)).message.endswith(": File name too long")

    def test_a_run_directory_on_a_read_only_file_system_is_rejected(self, tmp_path: Path) -> None:
        with mounted(tmp_path / "disk", "ro,size=16k") as disk:
            assert refusal(disk / "run").message == f"cannot write {disk}/run: Read-only file system"
            assert refusal(disk).message == f"cannot write {disk}: Read-only file system"


@contextlib.contextmanager
def mounted(point: Path, options: str) -> Iterator[Path]:
    """A tiny file system in memory; needs root, and a container that lets root mount."""
    point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(point)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


class TestCommand:
    """What `local` does with unusable run directories and with full disks."""

    def check(self, distlaunch: Distlaunch, root: Path, told: str) -> None:
        marker = root.parent.parent / "started"

        ran = distlaunch("local", "--run-dir", str(root), "--", "touch", str(marker), run_dir=False)

        assert ran.stderr == f"Error: {told} [run-directory]\n  {HINT}\n"
        assert (ran.status, ran.stdout) == (EXIT_INFRASTRUCTURE, "")
        assert not marker.exists()
        assert [p for p in psutil.process_iter(["cmdline"]) if str(marker) in (p.info["cmdline"] or [])] == []

    def test_local_rejects_a_run_directory_below_a_file(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        root = tmp_path / "file" / "run"

        self.check(distlaunch, root, f"cannot write {root}: {tmp_path}/file is not a folder")

    def test_local_rejects_a_run_directory_on_a_read_only_file_system(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        with mounted(tmp_path / "disk", "ro,size=16k") as disk:
            self.check(distlaunch, disk / "run", f"cannot write {disk}/run: Read-only file system")

    def test_local_rejects_a_run_directory_on_a_full_disk(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        with mounted(tmp_path / "disk", "size=16k") as disk:
            (disk / "everything").write_bytes(bytes(16 << 10))

            self.check(distlaunch, disk / "run", f"cannot write {disk}/run/run.json: No space left on device")
            assert [*(disk / "run").iterdir()] == []

    def test_a_disk_that_fills_up_during_a_run_fails_the_run(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        with mounted(tmp_path / "disk", "size=64k") as disk:
            ran = distlaunch(
                "local", "-n", "1", "--run-dir", str(disk / "run"), "--", "seq", "100000", run_dir=False, timeout=60
            )

            assert "[disk-full]\n" in ran.stderr
            told = f"Error: cannot write {disk}/run/report.json: No space left on device [run-directory]\n"
            assert f"{told}  the run has ended; only its report is missing\n  worker:0  exit status 1\n" in ran.stderr
            assert ran.stderr.endswith(f", exit status 3\nLogs: {disk}/run\n")
            assert ran.status == EXIT_INFRASTRUCTURE

    def test_a_full_disk_at_the_end_of_a_run_keeps_its_outcome(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        with mounted(tmp_path / "disk", "size=256k") as disk:
            fill = f"cat /dev/zero > {disk}/everything; exit 0"
            ran = distlaunch("local", "-n", "1", "--run-dir", str(disk / "run"), "--", "sh", "-c", fill, run_dir=False)

            assert f"Error: cannot write {disk}/run/report.json: No space left on device [run-directory]" in ran.stderr
            assert "\nSucceeded in " in ran.stderr
            assert ran.stderr.endswith(f"\nLogs: {disk}/run\n")
            assert ran.status == 0
            assert not (disk / "run" / "report.json").exists()

    def test_a_preemption_is_recognized_on_a_full_disk(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        with mounted(tmp_path / "disk", "size=256k") as disk:
            fill = f"cat /dev/zero > {disk}/everything; exit 143"
            ran = distlaunch("local", "-n", "1", "--run-dir", str(disk / "run"), "--", "sh", "-c", fill, run_dir=False)

            assert "was preempted: it exited with status 143" in ran.stderr
            assert "[preempted]\n" in ran.stderr
            assert ran.status == 1

    def test_local_rejects_a_run_directory_that_is_not_utf_8(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        ran = distlaunch("local", "--run-dir", tmp_path / os.fsdecode(b"caf\xe9"), "--", "true", run_dir=False)

        shown = os.fsencode(tmp_path / os.fsdecode(b"caf\xe9"))
        assert ran.stderr == f"Error: the run directory {shown!r} is not UTF-8 [run-directory]\n  {HINT}\n"
        assert ran.status == EXIT_INFRASTRUCTURE

    def test_local_rejects_a_run_directory_of_another_user(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        """The system stops ordinary users from this; root could do it, and would lock the owner out."""
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        (tmp_path / "run").mkdir(mode=0o755)
        os.chown(tmp_path / "run", 65534, -1)

        ran = distlaunch("local", "--", "true")

        assert f"Error: the run directory {tmp_path}/run belongs to " in ran.stderr
        assert ran.stderr.endswith("[run-directory]\n  choose a new folder; each run needs its own\n")
        assert ran.status == EXIT_INFRASTRUCTURE
        assert mode(tmp_path / "run") == 0o755
        assert [*(tmp_path / "run").iterdir()] == []

    def test_local_rejects_a_run_directory_that_is_not_empty(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "report.json").write_text("of yesterday")

        ran = distlaunch("local", "--", "true")

        told = f"Error: the run directory {tmp_path}/run is not empty [run-directory]\n"
        assert ran.stderr == f"{told}  choose a new folder; each run needs its own\n"
        assert ran.status == EXIT_INFRASTRUCTURE
        assert (tmp_path / "run" / "report.json").read_text() == "of yesterday"

    def test_the_default_run_directory_is_in_the_state_directory(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        ran = distlaunch(
            "local", "-n", "1", "--", "true", run_dir=False, env={"XDG_STATE_HOME": str(tmp_path / "state")}
        )

        (root,) = (tmp_path / "state" / "distlaunch" / "runs").iterdir()
        assert ran.status == 0
        assert ran.stderr.endswith(f"Logs: {root} · page: distlaunch report\n")
        assert (root / "report.json").exists()
        assert mode(tmp_path / "state") == 0o700

    def test_a_relative_run_directory_is_shown_as_an_absolute_path(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        ran = distlaunch("local", "-n", "1", "--run-dir", "here", "--", "true", run_dir=False)

        assert ran.stderr.endswith(f"Logs: {tmp_path}/here · page: distlaunch report\n")
        assert json.loads((tmp_path / "here" / "report.json").read_text())["directory"] == str(tmp_path / "here")


# --- the ends of logs ---


@linux
@pytest.mark.parametrize("behind", [0, 1, 5000, TAIL_BYTES, 1 << 40])
def test_the_last_lines_of_a_sparse_log_are_its_written_lines(tmp_path: Path, behind: int) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n")
    os.truncate(log, 1 << 30)
    with log.open("ab") as file:
        file.write(b"x" * TAIL_BYTES + b"\none\ntwo\n")
    os.truncate(log, log.stat().st_size + behind)
    assert last_lines(log, 2) == ["one", "two"]


def test_a_log_that_does_not_exist_yet_has_size_zero(tmp_path: Path) -> None:
    assert find_size(tmp_path / "worker-0.log") == 0
