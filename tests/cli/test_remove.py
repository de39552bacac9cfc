"""`rm` and `prune` remove only what they report: never a run that may be running, nothing behind a link."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launcher.commands import removal
from launcher.commands.removal import find_prunable, find_removable, measure, remove
from launcher.errors import DistlaunchError, RunDirectoryError, UsageError
from launcher.rundir.directory import RunDir
from tests.harness.builders.runs_on_disk import GONE, write_run
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.in_process import run_here
from tests.harness.witness import await_none_left, make_mark, wait_until

COVERS = ("launcher/commands", "launcher/rundir/directory.py", "launcher/rundir/select.py")

DAY_S = 86_400.0
ELSEWHERE = {"host": "gpu-a", "boot": "2f6c1c6e-0000-4000-8000-000000000000"}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runs, which commands use as well."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "distlaunch" / "runs"


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    if arguments[0] != "local":
        return run_here(*arguments)
    return subprocess.run(distlaunch_command(*arguments), capture_output=True, text=True, check=False, timeout=60)


def write_old(folder: Path, days: float, outcome: str = "succeeded") -> RunDir:
    moment = time.time() - days * DAY_S
    return write_run(folder, outcome=outcome, started=moment - 60, ended_at=moment)


def write_lost(folder: Path, days: float, lease_s: float = 60.0) -> RunDir:
    files = write_run(folder, controller=GONE, started=time.time() - days * DAY_S)
    files.write_json(files.spec, {"timeouts": {"lease_s": lease_s}})
    for path in (files.run, files.root):
        os.utime(path, (time.time() - days * DAY_S,) * 2)
    return files


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def prunable(*, keep: int = 0, days: float = 0.0) -> set[str]:
    return {path.name for path in find_prunable(os.environ, keep=keep, older_than_s=days * DAY_S)}


@pytest.fixture
def running(runs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real run, which a test may kill."""
    mark = make_mark()
    command = distlaunch_command("local", "-n", "1", "--", "sh", "-c", "echo up; sleep 600")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **mark})
    assert process.stdout is not None
    assert b"up" in process.stdout.readline()
    yield process
    process.terminate()
    process.communicate(timeout=60)
    await_none_left(mark)


class TestRm:
    def test_rm_removes_ended_and_lost_runs_and_reports_the_freed_bytes(self, runs: Path) -> None:
        ask("local", "-n", "1", "--", "sh", "-c", "exit 3")
        [name] = names(runs)
        (runs / name / "checkpoints" / "big").write_bytes(bytes(300_000))
        write_run(runs / "other", outcome="succeeded")
        write_run(runs / "lost", controller=GONE)

        gone = ask("rm", name[:15], "lost")

        assert (gone.returncode, gone.stderr) == (0, "")
        first, second, total = gone.stdout.splitlines()
        freed = int(first.split()[-2].replace(",", ""))
        assert first.startswith(f"Removed {name}: ")
        assert 300_000 <= freed < 500_000
        assert second.startswith("Removed lost: ")
        assert total.startswith("Freed: 2 runs, ")
        assert names(runs) == {"other"}

    def test_rm_rejects_a_running_run_and_removes_nothing(self, runs: Path, running: subprocess.Popen[bytes]) -> None:
        [name] = names(runs)
        write_run(runs / "other", outcome="succeeded")

        refused = ask("rm", "other", name)

        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == f"Error: run {name} is running [usage]\n  stop it with `distlaunch down {name}`\n"
        assert names(runs) == {"other", name}
        assert running.poll() is None

    @pytest.mark.slow
    def test_rm_rejects_a_lost_run_until_its_tasks_have_ended(
        self, runs: Path, running: subprocess.Popen[bytes]
    ) -> None:
        [name] = names(runs)
        agents = psutil.Process(running.pid).children(recursive=True)
        for agent in agents:
            agent.send_signal(signal.SIGSTOP)  # otherwise the agent ends its tasks at once
        running.kill()
        running.wait()

        refused = ask("rm", name)

        for agent in agents:
            with contextlib.suppress(psutil.NoSuchProcess):  # the agent was about to end
                agent.send_signal(signal.SIGCONT)
        assert refused.returncode == 2
        assert f"run {name} still running on this machine [usage]\n" in refused.stderr
        wait_until(lambda: ask("rm", name).returncode == 0, "they have ended")
        assert names(runs) == set()

    def test_rm_rejects_a_run_on_another_machine_or_in_another_container(self, runs: Path) -> None:
        write_run(runs / "far", controller=ELSEWHERE)
        write_run(runs / "contained", controller={"pid_namespace": "pid:[1]"})
        for name, place in (("far", "on gpu-a"), ("contained", "in another container on ")):
            with pytest.raises(UsageError, match=f"run {name} may be running: its controller is {place}"):
                find_removable([name])
        assert names(runs) == {"far", "contained"}

    def test_rm_rejects_other_folders_links_and_runs_of_other_users(self, runs: Path, tmp_path: Path) -> None:
        thesis = tmp_path / "thesis"
        thesis.mkdir()
        real = write_run(tmp_path / "real", outcome="succeeded")
        runs.mkdir(parents=True)
        (runs / "link").symlink_to(real.root)
        with pytest.raises(RunDirectoryError, match="is not a run's folder"):
            find_removable([str(thesis)])
        with pytest.raises(UsageError, match="is a symbolic link"):
            find_removable(["link"])
        if os.geteuid() == 0:
            os.chown(real.root, 54321, -1)
            with pytest.raises(UsageError, match="belongs to user 54321"):
                find_removable([str(real.root)])
        assert real.run.exists()

    def test_rm_removes_a_run_given_by_its_path(self, runs: Path, tmp_path: Path) -> None:
        files = write_run(tmp_path / "elsewhere", outcome="succeeded")
        (files.root / "data").symlink_to(tmp_path / "precious")
        (tmp_path / "precious").mkdir()

        gone = ask("rm", "--json", str(files.root), f"{files.root}/")

        [facts] = json.loads(gone.stdout)
        assert (facts["name"], facts["directory"]) == ("elsewhere", str(files.root))
        assert facts["bytes"] > 0
        assert names(tmp_path) == {"precious"}

    def test_rm_keeps_a_run_that_restarts_before_its_removal(self, runs: Path) -> None:
        write_run(runs / "a", outcome="succeeded")
        [files] = find_removable(["a"])
        shutil.rmtree(files.root)
        write_run(runs / "a")

        with pytest.raises(UsageError, match="run a is running"):
            remove(files.root)

        assert names(runs) == {"a"}

    def test_rm_without_a_run_name_is_a_usage_error(self, runs: Path) -> None:
        write_run(runs / "a", outcome="succeeded")
        assert ask("rm").returncode == 2
        assert ask("rm", "").returncode == 2
        assert names(runs) == {"a"}

    def test_rm_reports_why_a_removal_failed(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = write_run(runs / "a", outcome="succeeded")

        def no_permission(path: Path) -> None:
            raise PermissionError(1, "Operation not permitted", f"{path}/file")

        monkeypatch.setattr(shutil, "rmtree", no_permission)
        with pytest.raises(DistlaunchError, match=r"cannot remove .*/file: Operation not permitted"):
            remove(files.root)


class TestPrune:
    def test_prune_removes_runs_older_than_a_month_except_the_latest_twenty(self, runs: Path) -> None:
        for number in range(15):
            write_old(runs / f"new-{number:02}", days=number)
        for number in range(10):
            write_old(runs / f"old-{number:02}", days=40 + number)
        oldest = {f"old-{number:02}" for number in range(5, 10)}

        shown = ask("prune", "--dry-run", "--json")

        assert {each["name"] for each in json.loads(shown.stdout)} == oldest
        assert len(names(runs)) == 25
        done = ask("prune")
        assert done.returncode == 0
        assert done.stdout.splitlines()[-1].startswith("Freed: 5 runs, ")
        assert len(names(runs)) == 20
        assert names(runs) & oldest == set()
        assert ask("prune").stdout == "Nothing to remove\n"

    @pytest.mark.slow
    def test_prune_applies_both_keep_and_older_than_if_both_are_given(self, runs: Path) -> None:
        for days in (1, 2, 10, 20):
            write_old(runs / f"{days}-days", days=days)

        def would_remove(*options: str) -> list[str]:
            found = json.loads(ask("prune", "--dry-run", "--json", *options).stdout)
            return [each["name"] for each in found]

        assert would_remove("--keep", "1") == ["2-days", "10-days", "20-days"]
        assert would_remove("--older-than", "5d") == ["10-days", "20-days"]
        assert would_remove("--older-than", "36h", "--keep", "2") == ["10-days", "20-days"]
        assert would_remove("--older-than", "2w", "--keep", "1") == ["20-days"]
        assert ask("prune", "--older-than", "30").returncode == 2

    def test_prune_dry_run_reports_the_bytes_that_it_would_free(self, runs: Path) -> None:
        files = write_old(runs / "old", days=40)
        (files.root / "data").write_bytes(bytes(100_000))
        os.link(files.root / "data", files.root / "same-data")

        shown = ask("prune", "--keep", "0", "--dry-run").stdout

        size = measure(files.root).bytes
        assert 100_000 <= size < 150_000
        assert shown == f"Would remove old: {size:,} bytes\n"
        assert names(runs) == {"old"}

    def test_prune_keeps_runs_that_are_or_may_be_running(self, runs: Path) -> None:
        write_run(runs / "running", started=1.0)
        write_run(runs / "far", started=1.0, controller=ELSEWHERE)
        write_lost(runs / "leased", days=1, lease_s=2 * DAY_S)
        write_lost(runs / "lost", days=1)

        assert prunable() == {"lost"}
        assert prunable(days=2) == set()

    def test_prune_removes_only_valid_run_folders_of_the_current_user(self, runs: Path, tmp_path: Path) -> None:
        write_old(runs / "old", days=40)
        elsewhere = write_old(tmp_path / "elsewhere", days=40)
        (runs / "link").symlink_to(elsewhere.root)
        (runs / "linked-record").mkdir()
        (runs / "linked-record" / "run.json").symlink_to(elsewhere.run)
        (runs / "notes").mkdir()
        (runs / "half").mkdir()
        (runs / "half" / "run.json").write_text('{"run_id": "half", "contr')
        (runs / "file").write_text("mine")
        if os.geteuid() == 0:
            os.chown(write_old(runs / "theirs", days=40).root, 54321, -1)
        before = names(runs)

        assert ask("prune", "--keep", "0").returncode == 0

        assert names(runs) == before - {"old"}
        assert elsewhere.run.exists()

    def test_prune_keeps_the_target_of_a_link_inside_a_run(self, runs: Path, tmp_path: Path) -> None:
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "file").touch()
        (write_old(runs / "old", days=40).root / "data").symlink_to(tmp_path / "precious")

        ask("prune", "--keep", "0")

        assert names(runs) == set()
        assert names(tmp_path / "precious") == {"file"}

    def test_prune_finishes_an_interrupted_removal(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = write_old(runs / "old", days=1)

        def interrupt(_: Path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", interrupt)
            with pytest.raises(KeyboardInterrupt):
                remove(files.root)
        assert not files.root.exists()
        assert prunable() == set()  # the removal may be under way
        monkeypatch.setattr(removal, "LEFT_OVER_S", -1.0)
        [left] = find_prunable(os.environ, keep=0, older_than_s=0.0)
        remove(left)
        assert names(runs) == set()

    def test_prune_without_runs_reports_nothing_to_remove(self, runs: Path) -> None:
        assert (ask("prune").stdout, ask("prune", "--json").stdout) == ("Nothing to remove\n", "[]\n")
        assert not runs.exists()
