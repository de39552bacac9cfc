"""Files that are collected from nodes: which files, that they arrive complete, and that a broken transfer resumes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.controller.bundle import compile_patterns
from launcher.controller.collect.collector import Collector
from launcher.controller.collect.fetch import ASKED_AT_ONCE, PIECE, ROUNDS, FolderFetch, Order
from launcher.controller.collect.folder import CannotFetchError, CollectedFolder, publish, restore
from launcher.gang.state import Phase
from launcher.rundir.directory import RunDir
from launcher.spec.models import ClusterSpec
from launcher.transports.base import LinkClosed
from tests.harness.builders.collected_folders import folder
from tests.harness.processes.background import running
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.witness import wait_until
from tests.sim.nodes import At, Exit, FakeRun, Script, lose, say
from worker_entry.agent.files.copy import PART, CheckpointCopy, FolderCopy, ProgramCopy
from worker_entry.agent.files.finding import find_files
from worker_entry.protocol import collection
from worker_entry.protocol.collection import FileRead, FilesFound, FindFiles, FoundFile, ReadFile
from worker_entry.protocol.framing import Decoder, ProtocolError, encode
from worker_entry.protocol.messages import Fetch, Message, Refused, Saved, Synced
from worker_entry.protocol.orders import Offer, Piece
from worker_entry.protocol.values import FileEntry, TaskExit

COVERS = (
    "launcher/controller/collect/collector.py",
    "launcher/controller/collect/folder.py",
    "launcher/controller/collection_wait.py",
    "launcher/controller/collect/fetch.py",
    "launcher/commands/collect.py",
    "worker_entry/agent/files/source.py",
)


# --- which files are found ---


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def found(root: Path, *patterns: str, since: float = 0.0, runs: str = "/none") -> list[str]:
    answer = find_files(FindFiles(1, "", list(compile_patterns(patterns)), since), str(root), runs)
    assert not answer.problem
    assert answer.directory == str(root)
    return [file.path for file in answer.files]


def test_collect_patterns_have_the_syntax_of_gitignore(tmp_path: Path) -> None:
    write(
        tmp_path, "models/a/b", "models/c", "x.csv", "in/y.csv", "in/models/d", "other", ".git/x.csv", "in/models.txt"
    )
    assert found(tmp_path, "models/", "*.csv") == ["in/models/d", "in/y.csv", "models/a/b", "models/c", "x.csv"]
    assert found(tmp_path, "/models/", "!c") == ["models/a/b"]
    assert found(tmp_path, "in/**", "!*.csv", "y.csv") == ["in/models.txt", "in/models/d", "in/y.csv"]
    assert found(tmp_path, "nothing") == []
    assert found(tmp_path / "missing", "*") == []


def test_collect_finds_only_new_regular_files_outside_of_run_folders(tmp_path: Path) -> None:
    write(tmp_path, "old", "new", "runs/first/worker.log", "folder/é\n")
    os.utime(tmp_path / "old", (1000, 1000))
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "elsewhere").symlink_to("/etc")
    os.mkfifo(tmp_path / "pipe")
    assert found(tmp_path, "*", since=2000, runs=str(tmp_path / "runs")) == ["folder/é\n", "new"]


def test_collect_reports_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_entry.agent.files.finding.FOUND_LIMIT", 2)
    write(tmp_path, "a", "b", "c")
    answer = find_files(FindFiles(1, "", [], 0.0), str(tmp_path), "/none")
    assert answer == FilesFound(1, str(tmp_path), [], f"{tmp_path} has more than 2 files to collect")
    assert collection.FOUND_LIMIT > 1000


def test_collect_omits_unmodified_files_of_the_synced_program(tmp_path: Path) -> None:
    said: list[Message] = []
    files = {"train.py": b"1", "data.csv": b"2", "results.csv": b"3"}
    entries = [FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()]
    copy = ProgramCopy(Offer(str(tmp_path / "project"), "0" * 64, entries), said.append)
    feed(copy, said, [*files.values()])
    assert isinstance(said[-1], Synced)
    version = Path(said[-1].directory)
    (version / "results.csv").write_text("4")
    write(version, "more.csv")
    assert found(version, "*") == ["more.csv", "results.csv"]


def feed(copy: FolderCopy, said: list[Message], contents: Sequence[bytes]) -> None:
    """Runs the copy with the controller's answers."""
    answered = 0
    while not copy.done:
        copy.step()
        for fetch in [message for message in said if isinstance(message, Fetch)][answered:]:
            data = contents[fetch.index][fetch.offset : fetch.offset + fetch.size]
            copy.take(Piece(fetch.index, fetch.offset, len(data), fetch.checkpoint), data)
            answered += 1


def fetch(target: CollectedFolder, file: FoundFile, data: bytes) -> bool:
    offset = target.begin(file)
    target.write(file.path, offset, data[offset:])
    return target.finish(file.path)


def test_a_collected_file_is_named_when_complete_and_resumed_after_an_interruption(tmp_path: Path) -> None:
    file = FoundFile("a/b", 6, 1_700_000_000_123_456_789, 1)
    first = folder(tmp_path)
    assert first.begin(file) == 0
    first.write("a/b", 0, b"abc")
    first.write("a/b", 5, b"x")  # leaves a gap
    first.write("other", 0, b"x")
    assert not first.has(file)
    first.close()
    assert not (tmp_path / "to").exists()
    second = folder(tmp_path)
    assert second.begin(file) == 3
    second.write("a/b", 3, b"defgh")  # too long
    second.write("a/b", 3, b"def")
    assert second.finish("a/b")
    assert (tmp_path / "to/a/b").read_bytes() == b"abcdef"
    assert (tmp_path / "to/a/b").stat().st_mtime_ns == file.changed
    assert folder(tmp_path).has(file)
    assert not folder(tmp_path).has(FoundFile("a/b", 6, file.changed + 1, 1))
    assert (tmp_path / "to/a/b").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "to/a").stat().st_mode & 0o777 == 0o700


def test_a_partial_file_of_another_version_or_node_is_not_resumed(tmp_path: Path) -> None:
    target = folder(tmp_path)
    target.begin(FoundFile("a", 4, 10, 1))
    target.write("a", 0, b"old")
    target.close()
    assert folder(tmp_path).begin(FoundFile("a", 4, 11, 1)) == 0
    assert CollectedFolder(tmp_path / "to", tmp_path / ".parts", "gpu-b").begin(FoundFile("a", 4, 10, 1)) == 0


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "", "a//b", ".", "a/.", "a\0b"])
def test_a_collected_path_outside_of_the_folder_is_refused(path: str) -> None:
    frame = encode(FilesFound(1, "/x", [FoundFile(path, 1, 1, 1)]))
    with pytest.raises(ProtocolError, match="is not a path"):
        list(Decoder().feed(frame))


def test_a_collected_folder_replaces_a_file_or_link_with_its_name(tmp_path: Path) -> None:
    target = folder(tmp_path)
    assert fetch(target, FoundFile("a", 1, 1, 1), b"1")
    assert fetch(target, FoundFile("a/b", 1, 1, 1), b"2")
    assert (tmp_path / "to/a/b").read_bytes() == b"2"
    (tmp_path / "to/out").symlink_to(tmp_path)
    assert fetch(target, FoundFile("out/c", 1, 1, 1), b"3")
    assert not (tmp_path / "c").exists()
    assert (tmp_path / "to/out/c").read_bytes() == b"3"


def test_unchanged_files_are_copied_from_the_previous_collected_version(tmp_path: Path) -> None:
    file = FoundFile("a/b", 1, 5, 1)
    before = tmp_path / "before"
    assert fetch(CollectedFolder(before, tmp_path / ".parts", "x"), file, b"1")
    target = folder(tmp_path, before)
    assert target.has(file)
    assert (tmp_path / "to/a/b").read_bytes() == b"1"
    assert not target.has(FoundFile("a/b", 1, 6, 1))


def test_a_collected_folder_is_replaced_atomically_even_after_an_interruption(tmp_path: Path) -> None:
    place, new = tmp_path / "checkpoints", tmp_path / "new"
    write(place, "old")
    write(new, "new")
    publish(new, place)
    assert os.listdir(place) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoints"]
    place.rename(tmp_path / ".checkpoints.old")  # killed between the two renames
    restore(place)
    assert os.listdir(place) == ["new"]
    restore(place)
    assert os.listdir(place) == ["new"]


def test_a_fetch_without_enough_disk_space_is_refused_in_advance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=(1 << 30) + 1000))
    folder(tmp_path).check_space(1000)
    with pytest.raises(CannotFetchError, match=r"1,001 B have no room on the disk of .*, which has 1 GiB free"):
        folder(tmp_path).check_space(1001)


# --- a fetch ---


@dataclass
class Node:
    """A node that answers in order; `disturb` may change its files between two answers."""

    files: dict[str, tuple[int, bytes]]
    disturb: Callable[[Node], None] = lambda _: None
    asked: deque[Order] = field(default_factory=deque)
    sent: int = 0
    """Bytes sent."""

    def ask(self, orders: Sequence[Order]) -> None:
        self.asked.extend(orders)

    def answer(self) -> tuple[FilesFound | FileRead, bytes]:
        self.disturb(self)
        order = self.asked.popleft()
        if isinstance(order, FindFiles):
            files = [FoundFile(path, len(data), changed, 7) for path, (changed, data) in sorted(self.files.items())]
            return FilesFound(order.number, "/work", files), b""
        changed, data = self.files.get(order.path, (0, b""))
        part = data[order.offset : order.offset + order.size]
        self.sent += len(part)
        return FileRead(order.number, order.path, order.offset, len(part), len(data), changed), part


def make_fetch(root: Path, *, is_whole: bool = False) -> FolderFetch:
    return FolderFetch("gpu-a", FindFiles(1, "", [], 0.0), folder(root), lambda _, files: files, is_whole=is_whole)


def play(node: Node, fetching: FolderFetch, answers: int = 10**6) -> None:
    """Passes on this many answers."""
    for _ in range(answers):
        if not node.asked:
            return
        message, data = node.answer()
        if isinstance(message, FileRead):
            fetching.write(message, data)
        node.ask(fetching.take(message))
        assert len(node.asked) <= ASKED_AT_ONCE


def read_all(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


BIG = random.Random(1).randbytes(5 * PIECE + 17)


def test_a_fetch_receives_files_of_any_size_completely_and_only_once(tmp_path: Path) -> None:
    contents = {"empty": b"", "big": BIG, "exact": BIG[:PIECE], **{f"many/{n}": b"%d" % n for n in range(50)}}
    node = Node({path: (1000, data) for path, data in contents.items()})
    fetching = make_fetch(tmp_path)
    node.ask(fetching.begin())
    play(node, fetching)
    assert fetching.is_over
    assert not fetching.problem
    assert read_all(tmp_path / "to") == contents
    assert fetching.fetched_files == len(contents)
    assert fetching.left_bytes == 0
    sent = node.sent
    assert sent == sum(map(len, contents.values())) == fetching.fetched_bytes
    node.files["new"] = (1001, b"new")
    again = make_fetch(tmp_path)
    node.ask(again.begin())
    play(node, again)
    assert node.sent == sent + 3


def test_a_fetch_resumes_after_lost_answers_and_controller_restarts(tmp_path: Path) -> None:
    """Either the connection breaks and answers are lost, or the controller ends."""
    contents = {"a": BIG, "b": BIG[:-5], "c": b"c"}
    chance = random.Random(2)
    for seed in range(40):
        root = tmp_path / str(seed)
        node = Node({path: (1000, data) for path, data in contents.items()})
        fetching = make_fetch(root)
        node.ask(fetching.begin())
        breaks = 0
        while not fetching.is_over:
            play(node, fetching, chance.randrange(1, 6))
            if chance.random() < 0.5:
                breaks += 1
                if node.asked and isinstance(node.asked[0], FindFiles):
                    continue  # a list is sent again by the link
                lost = [node.asked.popleft() for _ in range(chance.randrange(len(node.asked) + 1))]
                kept = [*node.asked]  # the agent may still have requests that are repeated
                node.asked.clear()
                node.ask([*kept, *fetching.resume()])
                assert len(lost) + len(kept) <= ASKED_AT_ONCE
                while len(node.asked) > ASKED_AT_ONCE:
                    message, data = node.answer()
                    if isinstance(message, FileRead):
                        fetching.write(message, data)
                    node.asked.extend(fetching.take(message))
            elif chance.random() < 0.1:
                fetching.end("the controller is killed")
                node.asked.clear()
                fetching = make_fetch(root)
                node.ask(fetching.begin())
        assert not fetching.problem
        assert read_all(root / "to") == contents


def test_a_file_that_changes_during_a_fetch_is_read_again(tmp_path: Path) -> None:
    answers = 0

    def disturb(node: Node) -> None:
        nonlocal answers
        answers += 1
        if answers == 4:
            node.files["a"] = (2000, BIG[::-1])

    node = Node({"a": (1000, BIG)}, disturb)
    fetching = make_fetch(tmp_path)
    node.ask(fetching.begin())
    play(node, fetching)
    assert not fetching.problem
    assert read_all(tmp_path / "to") == {"a": BIG[::-1]}


def test_a_file_that_is_removed_during_a_fetch_is_no_error(tmp_path: Path) -> None:
    def disturb(node: Node) -> None:
        if node.asked and isinstance(node.asked[0], ReadFile):
            node.files.pop("a", None)

    node = Node({"a": (1000, BIG), "b": (1000, b"b")}, disturb)
    fetching = make_fetch(tmp_path)
    node.ask(fetching.begin())
    play(node, fetching)
    assert not fetching.problem
    assert read_all(tmp_path / "to") == {"b": b"b"}


def test_a_fetch_gives_up_files_that_change_permanently(tmp_path: Path) -> None:
    def disturb(node: Node) -> None:
        node.files["a"] = (node.files["a"][0] + 1, BIG)

    node = Node({"a": (1000, BIG)}, disturb)
    fetching = make_fetch(tmp_path)
    node.ask(fetching.begin())
    play(node, fetching)
    assert fetching.problem == "files change faster than they can be fetched"
    assert ROUNDS > 2


@pytest.mark.parametrize("seed", range(30))
def test_an_atomically_fetched_folder_equals_one_saved_state(seed: int, tmp_path: Path) -> None:
    """A program saves its index last; no fetched state may name weights that it does not contain."""
    chance = random.Random(seed)
    states: list[dict[str, bytes]] = []

    def save(node: Node) -> None:
        if states and chance.random() > 0.05:
            return
        number = len(states)
        weights = chance.randbytes(chance.randrange(3 * PIECE))
        node.files = {f"ckpt-{number}": (number + 1, weights), "checkpoint": (number + 1, b"ckpt-%d" % number)}
        states.append({path: data for path, (_, data) in node.files.items()})

    node = Node({}, save)
    save(node)
    fetching = make_fetch(tmp_path, is_whole=True)
    node.ask(fetching.begin())
    play(node, fetching)
    assert fetching.is_over
    if not fetching.problem:
        fetching.publish(tmp_path / "checkpoints")
        assert read_all(tmp_path / "checkpoints") in states


def test_a_node_with_inconsistent_answers_ends_the_fetch(tmp_path: Path) -> None:
    fetching = make_fetch(tmp_path)
    asked = deque(fetching.begin())
    assert fetching.take(FileRead(1, "a", 0, 0, 0, 0)) == []  # not requested
    answers = 0
    while asked:
        answers += 1
        if isinstance(asked.popleft(), FindFiles):
            asked.extend(fetching.take(FilesFound(1, "/work", [FoundFile("a", 5, 1, 1)])))
            continue
        part = FileRead(1, "a", 0, 2, 5, 1)  # less than was requested
        fetching.write(part, b"ab")
        asked.extend(fetching.take(part))
    assert answers < 3 * ROUNDS
    assert fetching.problem
    assert not (tmp_path / "to" / "a").exists()


def test_a_local_disk_error_ends_the_fetch_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node({"a": (1, BIG)})
    fetching = make_fetch(tmp_path)
    node.ask(fetching.begin())
    play(node, fetching, 2)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        play(node, fetching)
    assert fetching.problem == "cannot write the files: No space left on device"


# --- all nodes of a run ---


class Run:
    """A collector, and nodes that it asks."""

    def __init__(self, root: Path, nodes: dict[str, Node], **spec: Any) -> None:
        fields = {"nodes": [{"host": node} for node in nodes], "collect": ["*"], **spec}
        self.spec = ClusterSpec.model_validate(fields)
        self.files = RunDir.create(root / "run")
        self.nodes = nodes
        self.warnings: list[str] = []
        links: Any = SimpleNamespace(
            send=lambda node, order: nodes[node].ask([order]), clock_offset_s=lambda _: 0.0, store=None
        )
        self.links = links
        self.collector = Collector(self.spec, self.files, links, 0.0, self.warnings.append)
        self.collector.begin_attempt([*nodes], next(iter(nodes)))

    def play(self) -> None:
        while any(node.asked for node in self.nodes.values()):
            for name, node in self.nodes.items():
                if node.asked:
                    message, data = node.answer()
                    if isinstance(message, FileRead):
                        self.links.store(name, message, data)
                    assert self.collector.note(name, message)


def test_each_node_has_its_own_folder_and_shared_files_are_collected_once(tmp_path: Path) -> None:
    shared = {"shared.csv": (1000, b"shared")}
    nodes = {"gpu-a": Node({**shared, "a": (1000, b"a")}), "gpu-b": Node({**shared, "b": (1000, b"b")})}
    run = Run(tmp_path, nodes)
    run.collector.begin()
    run.play()
    assert not run.collector.is_busy
    assert read_all(run.files.collected) == {"gpu-a/shared.csv": b"shared", "gpu-a/a": b"a", "gpu-b/b": b"b"}
    report = run.collector.make_report()
    assert [(node.node, node.files, node.bytes, node.problem) for node in report] == [
        ("gpu-a", 2, 7, ""),
        ("gpu-b", 1, 1, ""),
    ]
    run.collector.close()
    assert sorted(os.listdir(run.files.collected)) == ["gpu-a", "gpu-b"]


def test_files_beyond_the_collect_limit_are_not_collected(tmp_path: Path) -> None:
    nodes = {"gpu-a": Node({"a": (1, BIG)}), "gpu-b": Node({"b": (2, BIG), "c": (2, b"c")})}
    run = Run(tmp_path, nodes, collect_limit_gib=1.5 * len(BIG) / (1 << 30))
    run.collector.begin()
    run.play()
    assert [*read_all(run.files.collected)] == ["gpu-a/a"]
    [_, refused] = run.collector.make_report()
    assert refused.problem == "2 files with 1.25 MiB exceed `collect_limit_gib` (1.88 MiB in all)"


def test_a_lost_node_is_reported_and_files_of_other_nodes_are_collected(tmp_path: Path) -> None:
    nodes = {"gpu-a": Node({"a": (1, BIG)}), "gpu-b": Node({"b": (1, b"b")}), "gpu-c": Node({})}
    run = Run(tmp_path, nodes)
    run.collector.note("gpu-c", LinkClosed("the connection broke"))
    run.collector.begin()
    run.collector.note("gpu-a", LinkClosed("it was switched off"))
    nodes["gpu-a"].asked.clear()
    run.play()
    problems = {node.node: node.problem for node in run.collector.make_report()}
    assert problems == {"gpu-a": "it was switched off", "gpu-b": "", "gpu-c": "the connection broke"}
    assert [*read_all(run.files.collected)] == ["gpu-b/b"]


def test_only_chief_checkpoints_are_collected_and_the_last_complete_one_is_kept(tmp_path: Path) -> None:
    nodes = {"gpu-a": Node({"w": (1, BIG), "checkpoint": (2, b"1")}), "gpu-b": Node({"x": (1, b"x")})}
    run = Run(tmp_path, nodes, checkpoint_directory="/scratch/ckpt")
    assert not run.collector.has_checkpoint
    assert run.collector.note("gpu-a", Saved("w", 1.0))
    assert not run.collector.note("gpu-b", Saved("x", 1.0))
    assert run.collector.is_saving
    assert run.collector.has_checkpoint
    run.collector.note("gpu-a", Saved("w", 2.0))  # another checkpoint during the fetch
    run.play()
    assert read_all(run.files.checkpoints) == {"w": BIG, "checkpoint": b"1"}
    nodes["gpu-a"].files = {"v": (3, BIG[:9]), "w": (1, BIG), "checkpoint": (4, b"2")}
    sent = nodes["gpu-a"].sent
    run.collector.note("gpu-a", Saved("v", 3.0))
    run.play()
    assert nodes["gpu-a"].sent == sent + 10  # only new files
    assert read_all(run.files.checkpoints) == {"v": BIG[:9], "w": BIG, "checkpoint": b"2"}
    del nodes["gpu-a"].files["w"]
    run.collector.note("gpu-a", Saved("v", 4.0))
    run.play()
    offer = run.collector.offer_checkpoint()
    assert (offer.to, offer.checkpoint) == ("/scratch/ckpt", True)
    assert [(entry.path, entry.size, entry.changed) for entry in offer.files] == [("checkpoint", 1, 4), ("v", 9, 3)]
    run.collector.note("gpu-a", Saved("v", 5.0))
    run.collector.note("gpu-a", LinkClosed("it was switched off"))
    assert run.warnings == ["checkpoints of gpu-a are not collected: it was switched off"]
    assert read_all(run.files.checkpoints) == {"v": BIG[:9], "checkpoint": b"2"}


def test_logs_in_the_checkpoint_directory_are_not_collected(tmp_path: Path) -> None:
    run = Run(tmp_path, {"gpu-a": Node({})}, checkpoint_directory="/scratch/ckpt")
    run.collector.note("gpu-a", Saved("w", 1.0))
    [order] = run.nodes["gpu-a"].asked
    assert isinstance(order, FindFiles)
    write(tmp_path / "ckpt", "logs/events", "ckpt-1", "in/logs/x")
    asked = FindFiles(1, "ckpt", order.patterns, 0.0)
    answer = find_files(asked, str(tmp_path), "/none")
    assert [file.path for file in answer.files] == ["ckpt-1", "in/logs/x"]


def test_without_collect_no_files_are_requested(tmp_path: Path) -> None:
    run = Run(tmp_path, {"gpu-a": Node({})}, collect=[], checkpoint_directory="/scratch/ckpt")
    assert not run.collector.note("gpu-a", Saved("w", 1.0))
    run.collector.begin()
    assert not run.nodes["gpu-a"].asked
    assert not run.collector.is_busy


@pytest.mark.parametrize("pattern", ["/etc/", "~/models", "../x", "a/../b", "!", "#x", "!/x"])
def test_a_collect_pattern_outside_of_the_working_directory_is_refused(pattern: str, distlaunch: Distlaunch) -> None:
    ran = distlaunch("local", "--set", f"collect=[{json.dumps(pattern)}]", "--", "true")
    assert ran.status == 2
    assert "is not in the working directory" in ran.stderr or "matches nothing" in ran.stderr


# --- the last checkpoint on a node ---


def offer(to: Path, files: dict[str, tuple[int, bytes]]) -> tuple[Offer, list[bytes]]:
    entries = [FileEntry(path, len(data), changed=changed) for path, (changed, data) in files.items()]
    return Offer(str(to), "0" * 64, entries, checkpoint=True), [data for _, data in files.values()]


def bring(to: Path, files: dict[str, tuple[int, bytes]]) -> Message:
    order, contents = offer(to, files)
    said: list[Message] = []
    feed(CheckpointCopy(order, said.append), said, contents)
    return said[-1]


def test_a_node_receives_only_different_checkpoint_files_and_keeps_its_other_files(tmp_path: Path) -> None:
    files = {"backup/weights": (2 * 10**18, BIG[:-1] * 4), "index": (2 * 10**18 + 1, b"1"), "empty": (5, b"")}
    to = tmp_path / "ckpt"
    assert bring(to, files) == Synced(str(to), 3, 4 * len(BIG) - 4 + 1, checkpoint=True)
    assert read_all(to) == {path: data for path, (_, data) in files.items()}
    assert (to / "index").stat().st_mtime_ns == 2 * 10**18 + 1
    write(to, "mine")
    os.utime(to / "index", (1000, 1000))
    assert bring(to, files) == Synced(str(to), 1, 1, checkpoint=True)
    assert (to / "mine").exists()
    assert bring(to, files) == Synced(str(to), 0, 0, checkpoint=True)


def test_a_node_keeps_newer_checkpoints(tmp_path: Path) -> None:
    to = tmp_path / "ckpt"
    write(to, "index", "other")
    assert bring(to, {"index": (10**18, b"1"), "weights": (10**18, b"2")}) == Synced(
        str(to), 0, 0, checkpoint=True, newer=True
    )
    assert read_all(to) == {"index": b"index", "other": b"other"}


def test_an_abandoned_checkpoint_copy_leaves_no_partial_file(tmp_path: Path) -> None:
    order, _ = offer(tmp_path / "ckpt", {"a": (1, BIG)})
    said: list[Message] = []
    copy = CheckpointCopy(order, said.append)
    copy.step()
    assert os.listdir(tmp_path / "ckpt") == [PART]
    copy.take(Piece(0, 0, 5), b"wrong")  # a piece of the program's folder
    assert copy.waits
    copy.abandon()
    assert os.listdir(tmp_path / "ckpt") == []


def test_a_checkpoint_path_outside_of_its_folder_is_refused(tmp_path: Path) -> None:
    answer = bring(tmp_path / "ckpt", {"../a": (1, b"1")})
    assert isinstance(answer, Refused)
    assert "outside the folder that was sent" in answer.problems[0].message
    assert os.listdir(tmp_path) == []


# --- runs in fake time ---


NODES = [{"host": "gpu-a"}, {"host": "gpu-b"}, {"host": "gpu-c", "spare": True}]
SAVING = {
    "nodes": NODES,
    "collect": ["*.csv"],
    "checkpoint_directory": "/scratch/ckpt",
    "restart": {"max_restarts": 1},
}


def test_the_replacement_of_a_lost_chief_receives_the_last_checkpoint_before_its_start(
    tmp_path: Path,
) -> None:
    script: Script = [
        At(Phase.RUNNING, say(Saved("ckpt-1", 1.0)), "gpu-a"),
        Exit("worker:0", TaskExit(1), after_s=1000.0),
        Exit("worker:1", TaskExit(0), after_s=1000.0),
    ]
    run = FakeRun(tmp_path, script, spec=SAVING, checks=False)
    run.nodes.files["gpu-a"] = {("/scratch/ckpt", "ckpt-1"): (1000, b"weights"), ("", "a.csv"): (2 * 10**18, b"a")}
    run.timing.after(60.0, lambda: run.nodes.agents["gpu-a"].lose("it was switched off", left=0))
    report = run.run()
    assert report.outcome == "succeeded", report.verdict
    assert [task.node for task in report.attempts[1].tasks] == ["gpu-c", "gpu-b"]
    for node in ("gpu-c", "gpu-b"):
        kinds = run.nodes.kinds_of(node)
        assert kinds.index("Offer") < kinds.index("Piece") < len(kinds) - 1 - kinds[::-1].index("Start")
    assert run.nodes.fetched == [b"weights"] * 2
    assert "Sent the last checkpoint, 1 file (7 B), to gpu-c" in run.sink.notes


def test_a_chief_lost_during_a_checkpoint_fetch_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    script: Script = [
        At(Phase.RUNNING, say(Saved("ckpt-1", 1.0)), "gpu-a"),
        Exit("worker:1", TaskExit(0), after_s=1000.0),
        Exit("worker:0", TaskExit(1), after_s=1000.0),
    ]
    run = FakeRun(tmp_path, script, spec=SAVING, checks=False)
    files = {("/scratch/ckpt", "ckpt-1"): (1000, b"old")}
    run.nodes.files["gpu-a"] = files

    def save_again() -> None:
        agent = run.nodes.agents["gpu-a"]
        files.update({("/scratch/ckpt", f"ckpt-{n}"): (1000 + n, BIG) for n in range(2, 20)})
        agent.answer(Saved("ckpt-2", 2.0))
        run.timing.after(0.035, lambda: agent.lose("it was switched off", left=0))

    run.timing.after(60.0, save_again)
    report = run.run()
    assert report.outcome == "succeeded", report.verdict
    assert "ReadFile" in run.nodes.kinds_of("gpu-a")[-3:]
    assert run.nodes.fetched == [b"old"] * 2


def test_a_node_lost_while_it_receives_a_checkpoint_fails_the_attempt(tmp_path: Path) -> None:
    script: Script = [
        At(Phase.RUNNING, say(Saved("ckpt-1", 1.0)), "gpu-a"),
        At(Phase.SYNCING, lose("it was switched off", left=0), "gpu-c"),
        Exit("worker:0", TaskExit(1), after_s=1000.0),
        Exit("worker:1", TaskExit(1), after_s=1000.0),
    ]
    run = FakeRun(tmp_path, script, spec={**SAVING, "restart": {"max_restarts": 1, "return_s": 0}}, checks=False)
    run.nodes.files["gpu-a"] = {("/scratch/ckpt", "ckpt-1"): (1000, b"weights")}
    run.timing.after(60.0, lambda: run.nodes.agents["gpu-a"].lose("it was switched off", left=0))
    report = run.run()
    assert report.attempts[1].verdict.reference == "node-lost"
    assert "gpu-c" in report.attempts[1].verdict.message


# --- runs on this machine ---


WRITES = "mkdir -p models; echo $DISTLAUNCH_TASK > models/$DISTLAUNCH_TASK; echo 1 > x.csv; echo 1 > other"


def test_files_written_during_a_run_are_collected_into_its_folder(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "before.csv").write_text("written before")
    os.utime(tmp_path / "before.csv", (1000, 1000))
    ran = distlaunch("local", "-n", "2", "--set", 'collect=[models/, "*.csv"]', "--", "sh", "-c", WRITES, cwd=tmp_path)
    assert ran.status == 0, ran.stderr
    assert read_all(ran.directory / "collected" / "local") == {
        "models/worker:0": b"worker:0\n",
        "models/worker:1": b"worker:1\n",
        "x.csv": b"1\n",
    }
    assert "  collected: 3 files, 20 B, in collected/" in ran.stderr
    [node] = ran.report["collected"]
    assert node == {"node": "local", "directory": str(tmp_path), "files": 3, "bytes": 20, "problem": ""}
    assert not (ran.directory / "collected" / ".parts").exists()


def collect(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        distlaunch_command("collect", *words), capture_output=True, text=True, cwd=folder, check=False, timeout=120
    )


def test_collect_fetches_files_of_running_and_ended_runs(tmp_path: Path) -> None:
    program = f"{WRITES}; until [ -e stop ]; do sleep 0.1; done; echo 2 > y.csv"
    with running(tmp_path, "-n", "1", "--set", 'collect=["*.csv"]', "--", "sh", "-c", f"{program}; echo at-end") as run:
        wait_until(lambda: (tmp_path / "other").exists(), "the task has written")
        told = collect(tmp_path, "./run")
        assert told.returncode == 0, told.stderr
        assert told.stdout == f"1 file, 2 B, in {run.directory}/collected\n"
        told = collect(tmp_path, "./run", "models/", "--json")
        assert [node["files"] for node in json.loads(told.stdout)] == [1]
        assert read_all(run.directory / "collected" / "local") == {"x.csv": b"1\n", "models/worker:0": b"worker:0\n"}
        (tmp_path / "stop").touch()
        assert run.end() == 0
    assert (run.directory / "collected" / "local" / "y.csv").exists()
    told = collect(tmp_path, "./run", "other")
    assert told.returncode == 0, told.stderr
    assert (run.directory / "collected" / "local" / "other").exists()
    assert [node["files"] for node in run.report["collected"]] == [1]
    told = collect(tmp_path, "./run", "/etc")
    assert told.returncode == 2
    assert "'/etc' is not in the working directory" in told.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ended_by_sigterm_can_be_collected_later(signum: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path, "-n", "1", "--set", 'collect=["*.csv"]', "--", "sh", "-c", f"{WRITES}; sleep 600") as run:
        wait_until(lambda: (tmp_path / "other").exists(), "the task has written")
        run.process.send_signal(signum)
        assert run.end() == 128 + signum
    if signum == signal.SIGTERM:
        assert "  not collected from local: the run had to end at once\n    distlaunch collect " in run.said
        assert not (run.directory / "collected" / "local").exists()
        assert collect(tmp_path, "./run").returncode == 0
        assert run.report["collected"][0]["problem"] == ""
    assert read_all(run.directory / "collected" / "local") == {"x.csv": b"1\n"}


def test_collect_of_a_run_without_patterns_is_refused_with_a_hint(distlaunch: Distlaunch, tmp_path: Path) -> None:
    ran = distlaunch("local", "-n", "1", "--", "true")
    told = collect(tmp_path, str(ran.directory))
    assert told.returncode == 2
    assert "the spec of the run has no `collect`" in told.stderr
    assert "distlaunch collect " in told.stderr
