"""Files and links of other users are not executed, and not written through."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.registry import CollectorRegistry

from launcher.commands import submit
from launcher.commands.warm import end_all
from launcher.controller.resume import find_requeued
from launcher.errors import RunDirectoryError, UsageError
from launcher.exporters.metrics import MetricsFile
from launcher.kubernetes.controller import _START
from launcher.own_command import own_command
from launcher.rundir import warm_nodes
from launcher.rundir.directory import RunDir, replace_text
from launcher.rundir.names import current_directory
from launcher.rundir.record import read_record
from launcher.rundir.select import select_run, verify_own
from launcher.slurm.script import render_script
from launcher.spec.models import ClusterSpec
from launcher.transports.payload import make_payload
from tests.harness.builders.runs_on_disk import write_run
from tests.harness.processes.in_process import run_here
from worker_entry.agent.files.versions import NotOursError, Versions
from worker_entry.program.compile_cache import _make_private
from worker_entry.system import ownership
from worker_entry.system.ownership import TRUST, find_intruder, private, verify_private

COVERS = (
    "launcher/commands",
    "launcher/exporters/metrics.py",
    "launcher/rundir/record.py",
    "launcher/rundir/directory.py",
    "launcher/rundir/select.py",
    "launcher/slurm/script.py",
    "worker_entry/bootstrap/install.py",
    "worker_entry/agent/files/versions.py",
    "worker_entry/program/compile_cache.py",
)

STRANGER = 54321
needs_two_users = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="a second user needs root and setpriv"
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which every user can create files; other users cannot enter the folders of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shared")
        path.mkdir()
        path.chmod(0o1777)
        Path(folder).chmod(0o755)
        yield path


@pytest.fixture
def as_stranger() -> Callable[..., None]:
    """Runs a shell command as another user."""

    def run(script: str, cwd: Path) -> None:
        command = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", "sh", "-ec", script]
        subprocess.run(command, cwd=cwd, check=True)

    return run


# --- who can change a folder ---


def test_a_folder_below_folders_of_this_user_and_root_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert private(str(folder)) == str(folder)
    assert find_intruder(str(folder)) == ""
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        (0o777, "can be written by every user"),
        (0o775, "can be written by group 12345"),
        (0o1775, "can be written by group 12345"),
    ],
)
def test_a_folder_that_others_can_write_to_is_not_private(tmp_path: Path, mode: int, reason: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, -1, 12345)
    elif "group" in reason:
        pytest.skip("only root can give a folder to another group")
    folder.chmod(mode)
    assert reason in find_intruder(str(folder))
    with pytest.raises(OSError, match=reason):
        verify_private(str(folder))


@pytest.mark.parametrize(("mode", "is_private"), [(0o1777, True), (0o777, False), (0o755, True)])
def test_a_private_folder_inside_a_world_writable_one_needs_its_sticky_bit(
    tmp_path: Path, mode: int, is_private: bool
) -> None:
    """With the sticky bit, as in /tmp, every user can create files, but replace only their own."""
    above = tmp_path / "above"
    folder = above / "mine"
    folder.mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    assert (find_intruder(str(folder)) == "") == is_private


def test_targets_of_links_in_a_path_must_be_private_as_well(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "mine").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "up").symlink_to(tmp_path / "open" / ".." / "closed")
    (tmp_path / "loop").symlink_to("loop")
    assert "every user" in find_intruder(str(tmp_path / "link" / "mine"))
    assert "every user" in find_intruder(str(tmp_path / "up"))
    assert "too many links" in find_intruder(str(tmp_path / "loop"))
    with pytest.raises(OSError, match="is not a folder"):
        verify_private(str(tmp_path / "link"))


@needs_two_users
def test_a_path_through_a_folder_of_another_user_is_not_private(shared: Path, as_stranger: Callable[..., None]) -> None:
    as_stranger("mkdir theirs; ln -s / link", shared)
    (shared / "theirs" / "mine").mkdir()
    for path in ("theirs", "theirs/mine", "link/etc"):
        assert f"belongs to user {STRANGER}" in find_intruder(str(shared / path))
    with pytest.raises(OSError, match=f"belongs to user {STRANGER}"):
        private(str(shared / "theirs"))


@needs_two_users
def test_the_sudo_user_named_folders_and_mounts_of_a_pod_are_trusted(
    shared: Path, as_stranger: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_stranger("mkdir -p theirs/inner", shared)
    for name, value in (
        ("SUDO_UID", str(STRANGER)),
        (TRUST, f"/nowhere:{shared}/theirs"),
        (TRUST, "*"),
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert find_intruder(str(shared / "theirs" / "inner")) == ""
    with monkeypatch.context() as patch:
        patch.setenv(TRUST, str(shared / "the"))
        assert find_intruder(str(shared / "theirs"))


def test_unmapped_owners_of_a_user_namespace_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ownership._unmapped_user() is None or find_intruder("/") == ""
    monkeypatch.setattr(ownership, "trusted_users", lambda: {1})
    monkeypatch.setattr(ownership, "_unmapped_user", lambda: 0)
    assert find_intruder("/") == ""


def test_the_bootstrap_code_does_not_import_worker_entry() -> None:
    assert b"import worker_entry" not in make_payload("node").bootstrap
    assert b"from worker_entry" not in make_payload("node").bootstrap
    assert b"def verify_private" in make_payload("node").bootstrap


# --- runs ---

COMMANDS = ("resume", "clean", "down", "attach", "report", "stacks", "profile", "rm")


@pytest.fixture
def trap(shared: Path) -> Path:
    """A run of another user, or one that others can write to; its spec starts a program on this machine."""
    files = write_run(shared / "trap", outcome="failed")
    connection = {"command": ["sh", "-c", f"echo caught > {shared}/caught"]}
    spec = ClusterSpec.model_validate(
        {"nodes": [{"host": "gpu-a"}], "connection": connection, "program": {"script": "x.py"}}
    )
    files.spec.write_text(spec.model_dump_json(exclude_unset=True))
    if os.geteuid() == 0:
        for path in (files.root, *files.root.rglob("*")):
            os.chown(path, STRANGER, STRANGER)
    else:
        files.root.chmod(0o777)
    return files.root


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_with_effects_refuse_runs_of_other_users(trap: Path, shared: Path, command: str) -> None:
    env = {"XDG_STATE_HOME": str(shared / "state")}
    unnamed = r"there is no run trap .*\n  for the folder, write \./trap"
    for name, why in (("trap", unnamed), ("./trap", "so it may say what that user wants")):
        done = run_here(command, name, cwd=shared, env=env)
        assert done.returncode == 2, done.stdout
        assert re.search(why, done.stderr), done.stderr
    assert not (shared / "caught").exists()


def test_read_only_commands_and_trusting_users_may_select_runs_of_others(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="what that user wants"):
        select_run(str(trap))
    assert select_run(str(trap), reads=True).root == trap
    monkeypatch.setenv(TRUST, str(trap.parent))
    assert select_run(str(trap)).root == trap


def test_requeued_jobs_and_warm_nodes_refuse_runs_of_other_users(
    trap: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job looks for its run, and `down --warm` for the runs that have kept nodes warm."""
    files = RunDir(trap)
    record = {**json.loads(files.run.read_bytes()), "job": "12"}
    files.run.write_text(json.dumps(record))
    with pytest.raises(UsageError, match="what that user wants"):
        find_requeued(trap, {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"})
    monkeypatch.setenv("XDG_STATE_HOME", str(shared / "state"))
    monkeypatch.setattr(warm_nodes, "find_waiting", lambda: iter(()))  # other tests keep warm agents here
    warm_nodes.remember(warm_nodes.KnownWarmNode("gpu-a", 1, time.time() + 60, str(trap)))
    [found] = end_all()
    assert "what that user wants" in found.problem
    assert not (shared / "caught").exists()


def test_a_run_folder_that_is_gone_passes_the_ownership_check(tmp_path: Path) -> None:
    assert verify_own(RunDir(tmp_path / "gone")).root == tmp_path / "gone"


def test_a_name_without_a_slash_is_not_read_as_a_spec_file(shared: Path) -> None:
    connection = {"command": ["sh", "-c", f"echo caught > {shared}/caught"]}
    spec = ClusterSpec.model_validate(
        {"nodes": [{"host": "gpu-a"}], "connection": connection, "program": {"script": "x.py"}}
    )
    (shared / "exp1").write_text(spec.model_dump_json(exclude_unset=True))
    done = run_here("clean", "exp1", cwd=shared, env={"XDG_STATE_HOME": str(shared / "state")})
    assert (done.returncode, (shared / "caught").exists()) == (2, False)
    assert "there is no run exp1" in done.stderr


@pytest.mark.parametrize(("job", "taken"), [("12", "12"), ("12_3", "12_3"), ("--help", ""), ("1\n2", ""), (None, "")])
def test_only_a_valid_job_id_is_read_from_a_run_record(tmp_path: Path, job: str | None, taken: str) -> None:
    files = write_run(tmp_path / "run")
    files.write_json(files.run, {**json.loads(files.run.read_bytes()), "job": job})
    assert read_record(files).job == taken


# --- the program's folder, and caches ---


@needs_two_users
@pytest.mark.parametrize("trick", ["mkdir .app.distlaunch", "ln -s .app.distlaunch/x app", "mkdir app"])
def test_a_program_is_not_copied_into_a_folder_of_another_user(
    shared: Path, as_stranger: Callable[..., None], trick: str
) -> None:
    as_stranger(trick, shared)
    with pytest.raises(NotOursError, match=r"belongs to|did not make it"):
        Versions(str(shared / "app")).find_current()


def test_a_program_is_not_copied_where_other_users_can_replace_it(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotOursError, match=f"can be written by every user; choose .*{TRUST}"):
        Versions(str(tmp_path / "open" / "below" / "app")).find_current()


def test_a_compile_cache_is_not_used_where_other_users_can_replace_it(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o1777)
    folder = _make_private(str(root / "tensorflow"))
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="every user"):
        _make_private(folder)


# --- the current folder ---


@pytest.fixture
def booby_trapped(tmp_path: Path) -> Path:
    """A folder with modules that have the names of modules of distlaunch and of Python."""
    for name in ("launcher/__init__.py", "typing.py", "json.py", "click.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'caught')!r}, 'w').close()\n")
    return tmp_path


def test_distlaunch_starts_itself_without_modules_of_the_current_folder(booby_trapped: Path) -> None:
    done = subprocess.run(
        own_command("--version"), cwd=booby_trapped, capture_output=True, text=True, check=False, env=without_path()
    )
    assert done.stdout.startswith("distlaunch "), done.stderr
    assert not (booby_trapped / "caught").exists()


def without_path() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_job_scripts_and_pods_start_distlaunch_without_modules_of_the_current_folder(
    booby_trapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(booby_trapped)
    spec = ClusterSpec.model_validate({"nodes": "slurm", "program": {"script": "x.py"}})
    script = submit.render(spec, booby_trapped / "run")
    script = script.replace("resume", "status")
    ran = subprocess.run(["sh"], input=script, env=without_path(), capture_output=True, text=True, check=False)
    assert "`distlaunch status` has no option --no-live" in ran.stderr, ran.stderr
    last = _START.strip().splitlines()[-1].replace('"up", "--no-live"', '"--version"')
    code = f"import os, sys\n{last}"
    ran = subprocess.run([sys.executable, "-c", code], env=without_path(), capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("distlaunch "), ran.stderr
    assert not (booby_trapped / "caught").exists()


# --- control characters ---

LINE = "a\n#SBATCH --partition=other"


def test_a_line_break_in_a_folder_name_cannot_inject_a_script_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / LINE
    folder.mkdir()
    with pytest.raises(RunDirectoryError, match="has control characters"):
        RunDir.create(folder / "run")
    spec = ClusterSpec.model_validate({"nodes": "slurm", "program": {"script": "x.py"}})
    for cwd, directory, command in ((LINE, "run", "x"), ("here", LINE, "x"), ("here", "run", LINE)):
        with pytest.raises(UsageError, match="cannot be written into a job's script"):
            render_script(spec, Path(directory), [command], cwd)
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="has control characters"):
        current_directory()


# --- planted links ---


def test_files_are_not_written_through_planted_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    (tmp_path / ".report.html.guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        replace_text(tmp_path / "report.html", "written")
    assert victim.read_text() == "kept"
    (tmp_path / "metrics.prom").symlink_to(victim)
    monkeypatch.undo()
    replace_text(tmp_path / "metrics.prom", "written")
    assert (victim.read_text(), (tmp_path / "metrics.prom").is_symlink()) == ("kept", False)


def test_metrics_and_warm_node_files_are_not_written_through_planted_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    monkeypatch.setattr("launcher.exporters.metrics.replace_text", lambda path, *_: written.append(path))
    monkeypatch.setattr("launcher.rundir.warm_nodes.replace_text", lambda path, *_: written.append(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    metrics = MetricsFile(tmp_path / "metrics.prom")
    monkeypatch.setattr("launcher.exporters.metrics.make_registry", lambda _: CollectorRegistry())
    metrics.begin(lambda: pytest.fail("no status is needed"), pytest.fail)
    metrics.close()
    warm_nodes.remember(warm_nodes.KnownWarmNode("gpu-a", 1, 2.0))
    assert {path.suffix for path in written} == {".prom", ".json"}
