"""The program's folder on other machines: what is sent, that it is whole, and that nobody sees half of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launcher.errors import UsageError
from launcher.spec_parts import SyncSpec
from launcher.sync import FILES_LIMIT, make_bundle
from tests.conftest import Distlaunch, distlaunch_command
from tests.sshd import Hosts, make_hosts, running_sshd
from tests.test_link_drops import send_to_sessions
from tests.test_ssh import skip_without_openssh
from tests.witness import wait_until
from worker_entry.messages import Fetch, Message, Refused, Synced
from worker_entry.orders import Offer
from worker_entry.replica import Replica
from worker_entry.values import FileEntry

PORT = 22025


def paths(root: Path, **fields: object) -> list[str]:
    sync = SyncSpec.model_validate({"to": "~/x", **fields})
    return [entry.path for entry in make_bundle(sync, root).entries]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


# --- what is sent ---


def test_what_git_ignores_and_what_the_spec_excludes_is_left_out(tmp_path: Path) -> None:
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


def test_without_git_everything_is_sent_but_what_python_and_git_keep_for_themselves(tmp_path: Path) -> None:
    write(tmp_path, {"a": "1", ".git/config": "1", "__pycache__/a.pyc": "1", "inner/b": "1", ".hidden": "1"})
    assert paths(tmp_path) == [".hidden", "a", "inner/b"]


def test_names_of_any_kind_and_links_within_the_folder_are_kept(tmp_path: Path) -> None:
    odd = ["a\nb", "sp ace", "é", os.fsdecode(b"\xff.bin")]
    write(tmp_path, dict.fromkeys(odd, "1"))
    (tmp_path / "link").symlink_to("é")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "up").symlink_to("../a\nb")
    (tmp_path / "folder").symlink_to("inner")
    entries = {entry.path: entry for entry in make_bundle(SyncSpec(to="~/x"), tmp_path).entries}
    assert entries.keys() == {*odd, "link", "inner/up", "folder"}
    assert [entries[name].link for name in ("link", "inner/up", "folder")] == ["é", "../a\nb", "inner"]


def test_everything_that_cannot_be_sent_is_told_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "absolute").symlink_to("/etc/passwd")
    (tmp_path / "out").symlink_to("../elsewhere")
    with pytest.raises(UsageError) as caught:
        make_bundle(SyncSpec(to="~/x"), tmp_path)
    assert caught.value.evidence == (
        "'absolute' is a link out of the folder, to /etc/passwd",
        "'out' is a link out of the folder, to ../elsewhere",
        "'pipe' is neither a file nor a link",
    )
    assert paths(tmp_path, exclude=["absolute", "out", "pipe"]) == []


def test_a_folder_that_was_not_meant_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.sync.FILES_LIMIT", 2)
    write(tmp_path, {"a": "", "b": "", "c": ""})
    with pytest.raises(UsageError) as caught:
        make_bundle(SyncSpec(to="~/x"), tmp_path)
    assert caught.value.evidence == ("3 files; the limit is 2",)
    assert FILES_LIMIT > 1000
    with pytest.raises(UsageError, match="is no folder"):
        make_bundle(SyncSpec(path="none", to="~/x"), tmp_path)


# --- the node's side ---


def offer(to: Path, files: dict[str, bytes], *links: FileEntry) -> Offer:
    entries = [FileEntry(n, len(data), hashlib.sha256(data).hexdigest()) for n, data in sorted(files.items())]
    digest = hashlib.sha256(repr((entries, links)).encode()).hexdigest()
    return Offer(str(to), digest, [*entries, *links])


def arrive(order: Offer, content: Callable[[str], bytes]) -> tuple[list[str], Message]:
    """Answers every Fetch; returns the paths that were fetched, and how it ended."""
    said: list[Message] = []
    fetched: list[str] = []
    replica = Replica(order, said.append)
    while not replica.done:
        replica.step()
        for message in said:
            if isinstance(message, Fetch):
                entry = order.files[message.index]
                fetched.append(entry.path)
                data = content(entry.path)[message.offset : message.offset + message.size]
                from worker_entry.orders import Piece

                replica.take(Piece(message.index, message.offset, len(data)), data)
        said = [message for message in said if not isinstance(message, Fetch)]
        replica._send = said.append
    return fetched, said[-1]


def test_only_what_changed_is_fetched(tmp_path: Path) -> None:
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


def test_what_a_task_has_changed_is_mended(tmp_path: Path) -> None:
    to = tmp_path / "project"
    files = {"a": b"1", "b": b"2"}
    arrive(offer(to, files), files.__getitem__)
    (to / "b").write_bytes(b"9")
    assert arrive(offer(to, files), files.__getitem__)[0] == ["b"]
    assert (to / "b").read_bytes() == b"2"


def test_content_that_is_not_what_was_offered_is_refused_and_nothing_stays_half(tmp_path: Path) -> None:
    to = tmp_path / "project"
    files = {"a": b"old"}
    arrive(offer(to, files), files.__getitem__)
    _, end = arrive(offer(to, {"a": b"new"}), lambda _: b"bad")
    assert isinstance(end, Refused)
    assert end.problems[0].message == "'a' was changed while it was sent; start again"
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
def test_no_offer_writes_outside_of_its_folder(tmp_path: Path, evil: list[FileEntry]) -> None:
    (tmp_path / "outside-folder").mkdir()
    before = {*Path("/").iterdir()}
    _, end = arrive(Offer(str(tmp_path / "nodes" / "project"), "0" * 64, evil), lambda _: b"x")
    assert isinstance(end, Refused)
    assert not list((tmp_path / "outside-folder").iterdir())
    assert {*Path("/").iterdir()} == before
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_distlaunch_did_not_make_is_left_alone(tmp_path: Path, kind: str) -> None:
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


# --- both sides, over SSH ---


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    skip_without_openssh()
    made = make_hosts(tmp_path_factory.mktemp("ssh"), port=PORT)
    made.trust()
    with running_sshd(made, *made.addresses.values()):
        yield made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    write(
        root, {"train.py": "import helper, os; print(helper.NAME, os.path.islink('link'))\n", "helper.py": "NAME = 1\n"}
    )
    write(root, {"run.sh": "#!/bin/sh\necho ran\n"})
    (root / "run.sh").chmod(0o755)
    (root / "link").symlink_to("helper.py")
    return root


@pytest.mark.ssh
def test_a_program_that_is_only_here_runs_there(distlaunch: Distlaunch, hosts: Hosts, project: Path) -> None:
    spec = hosts.write_spec("program: {script: train.py}\nsync: {to: ~/only-here}\n")
    ran = distlaunch("up", spec, env=hosts.env, cwd=project)
    assert ran.status == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["worker:0 │ 1 True", "worker:1 │ 1 True"]
    assert "Sent 4 files, " in ran.stderr
    (project / "helper.py").write_text("NAME = 2\n")
    shutil.rmtree(ran.directory)
    ran = distlaunch("up", spec, env=hosts.env, cwd=project)
    assert ran.status == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["worker:0 │ 2 True", "worker:1 │ 2 True"]
    assert "Sent 1 file, 0.0 MB, to gpu-" in ran.stderr
    shutil.rmtree(ran.directory)
    assert "Sent" not in distlaunch("up", spec, env=hosts.env, cwd=project).stderr
    assert os.access(hosts.home / "only-here" / "run.sh", os.X_OK)
    assert not os.access(hosts.home / "only-here" / "train.py", os.X_OK)


@pytest.mark.ssh
def test_check_sends_the_folder_too_and_finds_the_program(hosts: Hosts, project: Path) -> None:
    spec = hosts.write_spec("program: {script: train.py}\nsync: {to: ~/checked}\n")
    command = distlaunch_command("check", spec)
    env = {**os.environ, **hosts.env}
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (hosts.home / "checked" / "train.py").exists()


@pytest.mark.ssh
def test_a_connection_that_breaks_while_files_are_sent_loses_none(hosts: Hosts, project: Path, tmp_path: Path) -> None:
    big = os.urandom(1 << 20) * 300
    (project / "big.bin").write_bytes(big)
    spec = hosts.write_spec("program: {command: [sha256sum, big.bin]}\nsync: {to: ~/big}\n")
    process = subprocess.Popen(
        distlaunch_command("up", "--run-dir", str(tmp_path / "run"), spec),
        cwd=project,
        env={**os.environ, **hosts.env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    versions = hosts.home / ".big.distlaunch"

    def is_under_way() -> bool:
        return any(path.stat().st_size > 1 << 20 for path in versions.glob(".new-*/big.bin"))

    wait_until(is_under_way, "some of it has arrived")
    send_to_sessions(9)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    assert b"connected again after" in errors
    assert output.count(hashlib.sha256(big).hexdigest().encode()) == 2


@pytest.mark.ssh
def test_a_node_whose_sshd_dies_while_files_are_sent_is_lost_in_time(project: Path, tmp_path: Path) -> None:
    skip_without_openssh()
    (tmp_path / "ssh").mkdir()
    hosts = make_hosts(tmp_path / "ssh", {"gpu-a": "127.0.6.2", "gpu-b": "127.0.6.3"}, PORT)
    hosts.trust()
    with (project / "big.bin").open("wb") as file:
        for _ in range(400):
            file.write(os.urandom(1 << 20))
    lease_s = 5
    spec = hosts.write_spec(
        f"program: {{command: [sleep, '600']}}\nsync: {{to: ~/big}}\ntimeouts: {{lease_s: {lease_s}}}\n"
    )
    with running_sshd(hosts, "127.0.6.2"), running_sshd(hosts, "127.0.6.3"):
        process = subprocess.Popen(
            distlaunch_command("up", "--run-dir", str(tmp_path / "run"), spec),
            cwd=project,
            env={**os.environ, **hosts.env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        pieces = hosts.home / ".big.distlaunch"

        def is_under_way() -> bool:
            return any(path.stat().st_size > 1 << 20 for path in pieces.glob(".new-*/big.bin"))

        wait_until(is_under_way, "some of it has arrived")
        daemon = next(p for p in psutil.Process().children() if "ListenAddress=127.0.6.3" in p.cmdline())
        for sshd in (*daemon.children(), daemon):
            sshd.kill()
        died = time.monotonic()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors.decode()
    assert time.monotonic() - died < lease_s + 15  # on a busy machine
    assert b"node gpu-b was lost: the connection broke, and there was no way back within 5 s: connection refu" in errors
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["attempts"][0]["verdict"]["reference"] == "node-lost"
