"""The program's folder on other machines: what is sent, and that tasks see only complete copies of it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launcher.controller.bundle import FILES_LIMIT, make_bundle
from launcher.errors import UsageError
from launcher.spec.parts import SyncSpec
from tests.harness.apart import linux
from tests.harness.hosts.sshd import (
    Hosts,
    make_addresses,
    make_hosts,
    running_hosts,
    running_sshd,
    send_to_sessions,
    skip_without_openssh,
)
from tests.harness.places import ROOT
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import wait_until
from worker_entry.agent.files.copy import ProgramCopy
from worker_entry.agent.files.versions import ABANDONED_S
from worker_entry.protocol.messages import Fetch, Message, Noted, Refused, Synced
from worker_entry.protocol.orders import Offer, Piece
from worker_entry.protocol.values import FileEntry

COVERS = (
    "launcher/controller/bundle.py",
    "worker_entry/agent/files/copy.py",
    "worker_entry/agent/files/versions.py",
    "launcher/transports",
)


def paths(root: Path, **fields: object) -> list[str]:
    sync = SyncSpec.model_validate({"to": "~/x", **fields})
    return [entry.path for entry in make_bundle(sync, root).entries]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# --- what is sent ---


def test_sync_omits_files_that_git_ignores_or_the_spec_excludes(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    write(
        tmp_path,
        {
            ".gitignore": "*.log\n",
            "inner/.gitignore": "secret\n",
            "train.py": "1",
            "x.log": "1",
            "inner/secret": "1",
            "inner/code.py": "1",
            "inner/data.bin": "1",
            "__pycache__/train.pyc": "1",
        },
    )
    sent = paths(tmp_path, exclude=["*.bin"])
    assert sent == [".gitignore", "inner/.gitignore", "inner/code.py", "train.py"]


def test_without_git_sync_sends_all_files_except_bytecode_and_git_data(tmp_path: Path) -> None:
    write(tmp_path, {"a": "1", ".git/config": "1", "__pycache__/a.pyc": "1", "inner/b": "1", ".hidden": "1"})
    assert paths(tmp_path) == [".hidden", "a", "inner/b"]


def test_sync_keeps_unusual_file_names_and_links_within_the_folder(tmp_path: Path) -> None:
    odd = ["a\nb", "sp ace", "é", os.fsdecode(b"\xff.bin")]
    write(tmp_path, dict.fromkeys(odd, "1"))
    (tmp_path / "link").symlink_to("é")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "up").symlink_to("../a\nb")
    (tmp_path / "folder").symlink_to("inner")
    entries = {entry.path: entry for entry in make_bundle(SyncSpec(to="~/x"), tmp_path).entries}
    assert entries.keys() == {*odd, "link", "inner/up", "folder"}
    assert [entries[name].link for name in ("link", "inner/up", "folder")] == ["é", "../a\nb", "inner"]


def test_sync_reports_all_unsendable_files_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "absolute").symlink_to("/etc/passwd")
    (tmp_path / "out").symlink_to("../elsewhere")
    with pytest.raises(UsageError) as caught:
        make_bundle(SyncSpec(to="~/x"), tmp_path)
    assert caught.value.evidence == (
        "'absolute' is a link to /etc/passwd, outside the folder",
        "'out' is a link to ../elsewhere, outside the folder",
        "'pipe' is neither a file nor a link",
    )
    assert paths(tmp_path, exclude=["absolute", "out", "pipe"]) == []


def test_sync_sends_the_current_files_of_a_repository_and_of_nested_repositories(tmp_path: Path) -> None:
    """Git lists a repository within another as one name, and still lists files that have been deleted."""
    for repository in (tmp_path, tmp_path / "inner"):
        subprocess.run(["git", "init", "-q", str(repository)], check=True)
    write(tmp_path, {"deleted": "1", "package/deleted": "1", "inner/.gitignore": "*.log\n", "inner/x.log": "1"})
    write(tmp_path, {"inner/code.py": "1"})
    subprocess.run(["git", "-C", str(tmp_path), "add", "deleted", "package"], check=True)
    (tmp_path / "deleted").unlink()
    shutil.rmtree(tmp_path / "package")
    (tmp_path / "package").write_text("now a file")
    assert paths(tmp_path) == ["inner/.gitignore", "inner/code.py", "package"]


@linux
def test_sync_reports_an_unreadable_file(tmp_path: Path) -> None:
    task = f"/proc/{os.getpid()}/task/{os.getpid()}"  # even root cannot read the `mem` there from its beginning
    with pytest.raises(UsageError) as caught:
        make_bundle(SyncSpec(path=task, to="~/x", exclude=["*", "!/mem"]), tmp_path)
    assert caught.value.evidence == ("'mem' cannot be read: Input/output error",)


def test_sync_sends_no_bytes_of_a_file_deleted_after_the_offer(tmp_path: Path) -> None:
    write(tmp_path, {"a": "1"})
    bundle = make_bundle(SyncSpec(to="~/x"), tmp_path)
    (tmp_path / "a").unlink()
    assert bundle.read_piece(Fetch(0, 0, 1, 1)) == (Piece(0, 0, 0), b"")


def test_sync_refuses_too_many_files_and_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.controller.bundle.FILES_LIMIT", 2)
    write(tmp_path, {"a": "", "b": "", "c": ""})
    with pytest.raises(UsageError) as caught:
        make_bundle(SyncSpec(to="~/x"), tmp_path)
    assert caught.value.evidence == ("3 files; the limit is 2",)
    assert FILES_LIMIT > 1000
    with pytest.raises(UsageError, match="is not a folder"):
        make_bundle(SyncSpec(path="none", to="~/x"), tmp_path)


# --- the node's side ---


def offer(to: Path, files: dict[str, bytes], *links: FileEntry) -> Offer:
    entries = [FileEntry(n, len(data), hashlib.sha256(data).hexdigest()) for n, data in sorted(files.items())]
    digest = hashlib.sha256(repr((entries, links)).encode()).hexdigest()
    return Offer(str(to), digest, [*entries, *links])


def arrive(order: Offer, content: Callable[[str], bytes]) -> tuple[list[str], Message]:
    """Answers every Fetch; returns the paths that were fetched, and the last message."""
    said: list[Message] = []
    fetched: list[str] = []
    replica = ProgramCopy(order, said.append)
    while not replica.done:
        replica.step()
        for message in said:
            if isinstance(message, Fetch):
                entry = order.files[message.index]
                fetched.append(entry.path)
                data = content(entry.path)[message.offset : message.offset + message.size]
                replica.take(Piece(message.index, message.offset, len(data)), data)
        said = [message for message in said if not isinstance(message, Fetch)]
        replica._send = said.append
    return fetched, said[-1]


def test_a_node_fetches_only_changed_files(tmp_path: Path) -> None:
    to = tmp_path / "project"
    files = {"a": b"1", "inner/b": b"2" * 3_000_000}
    fetched, end = arrive(offer(to, files), files.__getitem__)
    assert fetched == ["a", "inner/b", "inner/b", "inner/b"]
    assert isinstance(end, Synced)
    assert (to / "inner" / "b").read_bytes() == files["inner/b"]
    assert arrive(offer(to, files), files.__getitem__)[0] == []
    files["a"] = b"3"
    assert arrive(offer(to, files), files.__getitem__)[0] == ["a"]
    assert (to / "a").read_bytes() == b"3"


def test_a_node_restores_program_files_that_a_task_changed(tmp_path: Path) -> None:
    to = tmp_path / "project"
    files = {"a": b"1", "b": b"2"}
    arrive(offer(to, files), files.__getitem__)
    (to / "b").write_bytes(b"9")
    assert arrive(offer(to, files), files.__getitem__)[0] == ["b"]
    assert (to / "b").read_bytes() == b"2"


def test_a_node_refuses_content_unlike_the_offer_and_leaves_no_partial_file(tmp_path: Path) -> None:
    to = tmp_path / "project"
    files = {"a": b"old"}
    arrive(offer(to, files), files.__getitem__)
    _, end = arrive(offer(to, {"a": b"new"}), lambda _: b"bad")
    assert isinstance(end, Refused)
    assert end.problems[0].message == "'a' changed while it was sent; start again"
    assert (to / "a").read_bytes() == b"old"
    assert not [name for name in os.listdir(tmp_path / ".project.distlaunch") if name.startswith(".new-")]


@pytest.mark.parametrize(
    "evil",
    [
        [FileEntry("../outside", 1, hashlib.sha256(b"x").hexdigest())],
        [FileEntry("/outside", 1, hashlib.sha256(b"x").hexdigest())],
        [FileEntry("way", link="../../outside-folder"), FileEntry("way/x", 1, hashlib.sha256(b"x").hexdigest())],
        [FileEntry("way", link="/"), FileEntry("way/x", 1, hashlib.sha256(b"x").hexdigest())],
    ],
    ids=["up", "absolute", "through a link up", "through a link to /"],
)
def test_no_offer_writes_files_outside_its_folder(tmp_path: Path, evil: list[FileEntry]) -> None:
    (tmp_path / "outside-folder").mkdir()
    before = {*Path("/").iterdir()}
    _, end = arrive(Offer(str(tmp_path / "nodes" / "project"), "0" * 64, evil), lambda _: b"x")
    assert isinstance(end, Refused)
    assert not list((tmp_path / "outside-folder").iterdir())
    assert {*Path("/").iterdir()} == before
    assert not (tmp_path / "outside").exists()


def test_a_node_reports_a_file_that_shrank_after_the_offer(tmp_path: Path) -> None:
    _, end = arrive(offer(tmp_path / "project", {"a": b"new"}), lambda _: b"n")
    assert isinstance(end, Refused)
    assert end.problems[0].message == "'a' changed while it was sent; start again"


def test_a_node_reports_a_sync_folder_that_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, end = arrive(offer(tmp_path / "file" / "project", {"a": b"1"}), lambda _: b"1")
    assert isinstance(end, Refused)
    assert re.fullmatch(rf"{tmp_path}/file.*: Not a directory", end.problems[0].message)


@linux
def test_a_node_restores_program_files_that_a_task_made_unreadable_or_executable(tmp_path: Path) -> None:
    to = tmp_path / "project"
    files = {"data/mem": b"", "train.py": b"1"}
    first, _ = arrived(offer(to, files), files)
    (first / "train.py").chmod(0o700)
    shutil.rmtree(first / "data")
    (first / "data").symlink_to("/proc/self")
    second, _ = arrived(offer(to, files), files)
    assert (second / "data" / "mem").read_bytes() == b""
    assert not (second / "data").is_symlink()
    assert (second / "train.py").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"9")], ids=["removed", "changed"])
def test_a_node_fetches_a_file_that_a_task_changes_during_the_sync(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    to = tmp_path / "project"
    files = {"a": b"1", "b": b"2"}
    first, _ = arrived(offer(to, files), files)
    said: list[Message] = []
    copy = ProgramCopy(offer(to, {**files, "b": b"3"}), said.append)
    copy.step()  # it has read all of `a`, which is as offered
    copy.step()  # it has read all of `b`, which is not
    change(first / "a")
    while not copy.waits:
        copy.step()
    assert said == [Fetch(0, 0, 1, 2)]
    copy.abandon()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_node_refuses_a_sync_folder_that_distlaunch_did_not_create(tmp_path: Path, kind: str) -> None:
    to = tmp_path / "project"
    (tmp_path / "mine").mkdir()
    if kind == "folder":
        to.mkdir()
    else:
        to.symlink_to("mine")
    _, end = arrive(offer(to, {"a": b"1"}), lambda _: b"1")
    assert isinstance(end, Refused)
    assert "distlaunch did not make" in end.problems[0].message
    assert not list((tmp_path / "mine").iterdir())
    assert to.is_symlink() == (kind == "link")


def arrived(
    order: Offer, files: dict[str, bytes], work: Callable[[Path], object] = lambda version: None
) -> tuple[Path, list[str]]:
    """The version that arrived, and the notes for the user; `work` runs in it while its agent lives."""
    said: list[Message] = []
    pieces: list[Fetch] = []

    def hear(message: Message) -> None:
        (pieces if isinstance(message, Fetch) else said).append(message)  # type: ignore[arg-type]

    replica = ProgramCopy(order, hear)
    while not replica.done:
        replica.step()
        while pieces:
            fetch = pieces.pop(0)
            data = files[order.files[fetch.index].path][fetch.offset : fetch.offset + fetch.size]
            replica.take(Piece(fetch.index, fetch.offset, len(data)), data)
    end = said.pop()
    assert isinstance(end, Synced), end
    assert [*replica._versions._held] == [end.directory]
    work(Path(end.directory))
    replica._versions.release(end.directory)  # as its agent's end does
    return Path(end.directory), [message.text for message in said if isinstance(message, Noted)]


class TestOldVersions:
    """Files that were sent are removed; files that tasks have written stay, and a note tells the user where."""

    def test_an_unmodified_old_program_version_is_removed(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        files = {"train.py": b"1", "inner/helper.py": b"1", "same": b"1"}
        link = FileEntry("inner/link", link="helper.py")
        first, _ = arrived(offer(to, files, link), files)
        (first / "__pycache__").mkdir()
        (first / "__pycache__" / "train.cpython-311.pyc").write_bytes(b"by Python itself")
        (first / "same").write_bytes(b"1")  # written again, but equal to what was sent
        files["train.py"] = b"2"
        second, told = arrived(offer(to, files, link), files)
        assert told == []
        assert {path.name for path in second.parent.iterdir()} == {
            f"{second.name}{ending}" for ending in ("", ".lock", ".files")
        }

    def test_files_that_a_task_wrote_to_an_old_program_version_are_kept(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        files = {"train.py": b"1", "data/a.csv": b"a", "data/b.csv": b"b", "results.csv": b"x"}
        first, _ = arrived(offer(to, files), files)
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "train.py").write_bytes(b"1")
        (first / "checkpoints" / "deep").mkdir(parents=True)
        (first / "checkpoints" / "deep" / "model.keras").write_bytes(b"weeks of work")
        (first / "shared").symlink_to(tmp_path / "elsewhere")
        (first / "results.csv").unlink()
        (first / "results.csv").symlink_to("data/b.csv")
        (first / "data" / "a.csv").write_bytes(b"x")
        files["train.py"] = b"2"
        second, told = arrived(offer(to, files), files)
        assert told == [f"files that tasks wrote to an old version of {to} are kept in {first}"]
        left = {str(path.relative_to(first)) for path in first.rglob("*") if not path.is_dir()}
        assert left == {"checkpoints/deep/model.keras", "results.csv", "data/a.csv"}
        assert (first / "shared").is_symlink()
        assert (tmp_path / "elsewhere" / "train.py").exists()
        files["train.py"] = b"3"
        assert arrived(offer(to, files), files)[1] == []  # the note appears once
        assert (first / "checkpoints" / "deep" / "model.keras").read_bytes() == b"weeks of work"
        assert not second.exists()

    def test_cleanup_of_an_old_program_version_does_not_follow_links(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        files = {"train.py": b"1", "data/a.csv": b"a"}
        first, _ = arrived(offer(to, files), files)
        (first / "data").rename(tmp_path / "data")  # the move changes no file in it
        (first / "data").symlink_to(tmp_path / "data")
        files["train.py"] = b"2"
        arrived(offer(to, files), files)
        assert (tmp_path / "data" / "a.csv").read_bytes() == b"a"

    def test_an_old_program_version_that_a_run_still_uses_is_kept(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        files = {"train.py": b"1"}
        first, _ = arrived(offer(to, files), files)
        with (tmp_path / ".project.distlaunch" / f"{first.name}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            arrived(offer(to, {"train.py": b"2"}), {"train.py": b"2"})
            assert (first / "train.py").read_bytes() == b"1"
        arrived(offer(to, {"train.py": b"3"}), {"train.py": b"3"})
        assert not first.exists()

    def test_a_folder_that_distlaunch_did_not_create_is_kept_among_program_versions(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        other = tmp_path / ".project.distlaunch" / "0123456789abcdef-xyz"
        write(other, {"train.py": "1"})
        arrived(offer(to, {"train.py": b"2"}), {"train.py": b"2"})
        assert (other / "train.py").exists()

    def test_an_old_program_version_with_a_damaged_file_list_is_kept(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        first, _ = arrived(offer(to, {"train.py": b"1"}), {"train.py": b"1"})
        Path(f"{first}.files").write_text("[")
        arrived(offer(to, {"train.py": b"2"}), {"train.py": b"2"})
        assert (first / "train.py").exists()

    def test_a_program_version_that_another_agent_is_removing_is_not_used(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        files = {"train.py": b"1"}
        first, _ = arrived(offer(to, files), files)
        with Path(f"{first}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            second, _ = arrived(offer(to, files), files)
        assert second != first

    def test_unfinished_program_versions_are_removed_after_a_day_and_not_before(self, tmp_path: Path) -> None:
        to = tmp_path / "project"
        versions = tmp_path / ".project.distlaunch"
        write(versions, {".new-old/train.py": "1", ".new-young/train.py": "1"})
        (versions / ".new-link").symlink_to(".new-young")
        long_ago = time.time() - ABANDONED_S - 1
        for name in (".new-old", ".new-link"):
            os.utime(versions / name, (long_ago, long_ago), follow_symlinks=False)
        arrived(offer(to, {"train.py": b"1"}), {"train.py": b"1"})
        assert [path.name for path in versions.glob(".new-*")] == [".new-young"]
        assert (versions / ".new-young" / "train.py").exists()


SHARED_HOME = """
import sys
from pathlib import Path
from tests.node.agent.test_program_folder import arrived, offer
to, name, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for number in range(rounds):
    files = {f"inner/{i}": f"{number // 2} {name if number % 2 else ''} {i}".encode() for i in range(4)}
    def work(version):
        for path, data in files.items():
            assert (version / path).read_bytes() == data
        (version / f"of-{name}-{number}").write_text("a checkpoint")
    arrived(offer(to, files), files, work)
"""


@pytest.mark.slow
def test_nodes_with_a_shared_home_can_receive_program_versions_at_the_same_time(tmp_path: Path) -> None:
    """All of them receive the same version or different versions at the same time."""
    to, rounds, names = tmp_path / "project", 25, ["a", "b", "c"]
    nodes = [
        subprocess.Popen([sys.executable, "-c", SHARED_HOME, str(to), name, str(rounds)], cwd=ROOT) for name in names
    ]
    assert [node.wait(120) for node in nodes] == [0] * len(names)
    written = {path.name for path in (tmp_path / ".project.distlaunch").glob("*/of-*")}
    assert written == {f"of-{name}-{number}" for name in names for number in range(rounds)}


# --- both sides, over SSH ---


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    skip_without_openssh()
    with running_hosts(tmp_path_factory.mktemp("ssh")) as hosts:
        hosts.trust()
        yield hosts


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write(
        root,
        {
            "train.py": "import helper, os; print(helper.NAME, os.path.islink('link')); open('written', 'w')\n",
            "helper.py": "NAME = 1\n",
        },
    )
    write(root, {"run.sh": "#!/bin/sh\necho ran\n"})
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("helper.py")
    return root


@pytest.mark.ssh
def test_a_synced_program_runs_on_remote_nodes_and_only_changes_are_resent(
    distlaunch: Distlaunch, hosts: Hosts, project: Path
) -> None:
    spec = hosts.write_spec("program: {script: train.py}\nsync: {to: ~/only-here}\n")
    ahead = distlaunch("plan", spec, "--json", env=hosts.env, cwd=project, run_dir=False)
    ran = distlaunch("up", spec, env=hosts.env, cwd=project)
    assert ran.status == 0, ran.stderr
    shown, started = (
        [(task["node"], task["address"], task["program"], task["command"].partition("&&")[0]) for task in plan["tasks"]]
        for plan in (json.loads(ahead.stdout), json.loads((ran.directory / "plan.json").read_text()))
    )
    assert shown == started
    assert {address for _, address, _, _ in shown} == {*hosts.addresses.values()}  # only in ssh's configuration
    assert sorted(ran.stdout.splitlines()) == ["worker:0 │ 1 True", "worker:1 │ 1 True"]
    assert "Sent 4 files (" in ran.stderr
    written = {*hosts.home.glob(".only-here.distlaunch/*/written")}
    assert written
    (project / "helper.py").write_text("NAME = 2\n")
    shutil.rmtree(ran.directory)
    ran = distlaunch("up", spec, env=hosts.env, cwd=project)
    assert ran.status == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["worker:0 │ 2 True", "worker:1 │ 2 True"]
    assert "Sent 1 file (" in ran.stderr
    for path in written:
        assert f": files that tasks wrote to an old version of ~/only-here are kept in {path.parent}\n" in ran.stderr
        assert [*path.parent.iterdir()] == [path]
    shutil.rmtree(ran.directory)
    assert "Sent" not in distlaunch("up", spec, env=hosts.env, cwd=project).stderr
    assert os.access(hosts.home / "only-here" / "run.sh", os.X_OK)
    assert not os.access(hosts.home / "only-here" / "train.py", os.X_OK)


@pytest.mark.ssh
def test_a_relative_pythonpath_in_a_synced_folder_works_with_early_tensorflow_imports(
    distlaunch: Distlaunch, hosts: Hosts, project: Path
) -> None:
    program = "import helper, sys, tensorflow\nprint(helper.NAME, sys._getframe(1).f_code.co_name)\n"
    write(project, {"train.py": program, "src/helper.py": "NAME = 'found'\n"})
    (project / "helper.py").unlink()
    (project / "link").unlink()
    spec = hosts.write_spec("program: {script: train.py}\nsync: {to: ~/new}\nenv: {PYTHONPATH: src}\n")
    ran = distlaunch("up", spec, env=hosts.env, cwd=project)
    assert ran.status == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["worker:0 │ found _run_script", "worker:1 │ found _run_script"]


@pytest.mark.ssh
def test_check_syncs_the_folder_and_finds_the_program(hosts: Hosts, project: Path) -> None:
    spec = hosts.write_spec("program: {script: train.py}\nsync: {to: ~/checked}\n")
    command = distlaunch_command("check", spec)
    env = {**os.environ, **hosts.env}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (hosts.home / "checked" / "train.py").exists()


def start(hosts: Hosts, project: Path, run_dir: Path, rest: str) -> subprocess.Popen[bytes]:
    """Starts `distlaunch up` in the project and returns at once."""
    return subprocess.Popen(
        distlaunch_command("up", "--run-dir", str(run_dir), hosts.write_spec(rest)),
        cwd=project,
        env={**os.environ, **hosts.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_until_big_file_is_under_way(versions: Path) -> None:
    def is_under_way() -> bool:
        return any(path.stat().st_size > 1 << 20 for path in versions.glob(".new-*/big.bin"))

    wait_until(is_under_way, "some of it has arrived")


@pytest.mark.ssh
def test_no_file_is_lost_if_the_connection_breaks_during_a_sync(hosts: Hosts, project: Path, tmp_path: Path) -> None:
    big = os.urandom(1 << 20) * 300
    (project / "big.bin").write_bytes(big)
    rest = "program: {command: [sha256sum, big.bin]}\nsync: {to: ~/big}\n"
    process = start(hosts, project, tmp_path / "run", rest)
    wait_until_big_file_is_under_way(hosts.home / ".big.distlaunch")
    send_to_sessions(9)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    assert b"reconnected after" in errors
    assert output.count(hashlib.sha256(big).hexdigest().encode()) == 2


@pytest.mark.ssh
def test_sigterm_during_a_sync_ends_the_run_with_a_report(hosts: Hosts, project: Path, tmp_path: Path) -> None:
    with (project / "big.bin").open("wb") as big:
        big.truncate(600 << 20)
    rest = "program: {command: ['true']}\nsync: {to: ~/interrupted}\n"
    process = start(hosts, project, tmp_path / "run", rest)
    versions = hosts.home / ".interrupted.distlaunch"
    wait_until(lambda: any(versions.glob(".new-*/big.bin")), "it is being sent")
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors.decode()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["outcome"], report["verdict"]["reference"]) == ("interrupted", "interrupted")
    assert b"SIGTERM: stopping all tasks" in errors
    assert not (hosts.home / "interrupted").exists()
    assert not [*versions.glob(".new-*")]


@pytest.mark.ssh
def test_a_node_is_lost_if_its_sshd_dies_during_a_sync(project: Path, tmp_path: Path) -> None:
    skip_without_openssh()
    (tmp_path / "ssh").mkdir()
    hosts = make_hosts(tmp_path / "ssh", make_addresses(6))  # in addition to the hosts of the module
    hosts.trust()
    (project / "big.bin").write_bytes(os.urandom(1 << 20) * 400)
    lease_s = 5
    rest = f"program: {{command: [sleep, '600']}}\nsync: {{to: ~/big}}\ntimeouts: {{lease_s: {lease_s}}}\n"
    a, b = hosts.addresses.values()
    with running_sshd(hosts, a), running_sshd(hosts, b):
        process = start(hosts, project, tmp_path / "run", rest)
        wait_until_big_file_is_under_way(hosts.home / ".big.distlaunch")
        running = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        daemon = next(p for p in running if f"ListenAddress={b}" in p.cmdline())
        daemon.suspend()  # otherwise it may accept the controller's next connection between the two kills
        for sshd in (*daemon.children(), daemon):
            sshd.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors.decode()
    assert b"node gpu-b was lost: the connection broke, and not reconnected within 5 s: connection refu" in errors
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["attempts"][0]["verdict"]["reference"] == "node-lost"
