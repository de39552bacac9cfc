"""Event files: TensorBoard's own reader finds the written points, even after errors of the disk."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.controller.links import NodeLinks
from launcher.exporters.tensorboard import POINTS, ScalarSender, make_points
from launcher.report.goodput import Goodput
from launcher.report.models import AttemptReport
from launcher.report.run_events import AttemptEnded
from launcher.report.status_report import TaskState
from launcher.rundir.journal import Journal
from launcher.verdict.models import Verdict
from tests.harness.builders.statuses import make_status
from tests.harness.places import ROOT
from tests.harness.witness import open_descriptors
from worker_entry.agent import tensorboard
from worker_entry.agent.tensorboard import EventFiles, crc32c
from worker_entry.protocol.costs import FRAME_LIMIT
from worker_entry.protocol.framing import Decoder, ProtocolError, encode
from worker_entry.protocol.orders import ScalarPoint, Scalars

COVERS = (
    "worker_entry/agent/tensorboard.py",
    "launcher/exporters/tensorboard.py",
    "worker_entry/protocol/orders.py",
)

Curve = list[tuple[float, int, float]]
Reader = Callable[[Path], dict[str, Curve]]

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed"
)


@pytest.fixture(scope="module")
def read() -> Reader:
    """Time, step and value of each point by tag, as TensorBoard reads them."""
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    return functools.partial(read_with, module)


def read_with(module: Any, folder: Path) -> dict[str, Curve]:
    before = {*os.environ}
    accumulator = module.EventAccumulator(str(folder), size_guidance={module.SCALARS: 0})
    accumulator.Reload()
    for name in {*os.environ} - before:  # the reader imports TensorFlow, which sets variables
        del os.environ[name]
    return {
        tag: [(point.wall_time, point.step, point.value) for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def point(step: int, folder: str = "distlaunch/worker-0") -> ScalarPoint:
    return ScalarPoint(folder, step, 1000.25, {"own": step / 4})


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_event_file_checksum_matches_rfc_3720() -> None:
    """The vectors of RFC 3720."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E


@pytest.mark.slow
@needs_tensorboard
def test_tensorboard_reads_the_written_points(read: Reader, tmp_path: Path) -> None:
    chance = random.Random(5)
    written = [(1000 + n / 8, n * 7919 - 20, chance.uniform(-1e15, 1e15)) for n in range(300)]
    files = EventFiles()
    for time, step, value in written:
        values = {"a/b c é": value, "zero": 0.0}
        order = Scalars(str(tmp_path), [ScalarPoint("distlaunch/worker-0", step, time, values)])
        assert files.write(order) is None
    curves = read(tmp_path / "distlaunch" / "worker-0")
    assert curves.keys() == {"a/b c é", "zero"}
    assert [(time, step) for time, step, _ in curves["a/b c é"]] == [(time, step) for time, step, _ in written]
    assert [value for *_, value in curves["a/b c é"]] == pytest.approx([value for *_, value in written], rel=1e-6)


@pytest.mark.slow
@needs_tensorboard
def test_each_task_folder_has_its_own_private_event_file(read: Reader, tmp_path: Path) -> None:
    order = Scalars(str(tmp_path / "logs"), [point(1), point(2, "distlaunch/ps-11"), point(3, "distlaunch")])
    assert EventFiles().write(order) is None
    found = files_in(tmp_path)
    assert [str(path.parent.relative_to(tmp_path)) for path in found] == [
        "logs/distlaunch",
        "logs/distlaunch/ps-11",
        "logs/distlaunch/worker-0",
    ]
    assert {path.stat().st_mode & 0o777 for path in found} == {0o600}
    assert (tmp_path / "logs" / "distlaunch").stat().st_mode & 0o777 == 0o700
    assert read(tmp_path / "logs" / "distlaunch" / "ps-11") == {"own": [(1000.25, 2, 0.5)]}


@needs_tensorboard
def test_another_agent_adds_an_event_file_and_changes_no_existing_one(read: Reader, tmp_path: Path) -> None:
    EventFiles().write(Scalars(str(tmp_path), [point(1)]))
    [first] = files_in(tmp_path)
    before = first.read_bytes()
    EventFiles().write(Scalars(str(tmp_path), [point(2)]))
    assert first.read_bytes() == before
    assert len(files_in(tmp_path)) == 2
    assert [step for _, step, _ in read(first.parent)["own"]] == [1, 2]


@needs_tensorboard
def test_a_full_disk_loses_points_but_later_points_can_be_read(read: Reader, tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: the kernel writes a part of a record, then nothing."""
    script = (
        "import resource, signal, sys\n"
        "from worker_entry.agent.tensorboard import EventFiles\n"
        "from worker_entry.protocol.orders import Scalars\n"
        "from worker_entry.protocol.orders import ScalarPoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "def write(step):\n"
        "    print(files.write(Scalars(sys.argv[1], [ScalarPoint('distlaunch', step, 1.0, {'a': 1.0})])))\n"
        "def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        "files = EventFiles()\n"
        "limit(10)\nwrite(1)\nlimit(100)\n[write(step) for step in (2, 3, 4)]\n"
        "limit(resource.RLIM_INFINITY)\nwrite(5)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    [file] = files_in(tmp_path)
    assert done.stdout.splitlines() == [f"{file}: File too large", "None", "None", "None", "None"]
    assert [step for _, step, _ in read(file.parent)["a"]] == [2, 5]


@pytest.mark.slow
@needs_tensorboard
def test_an_event_folder_that_the_program_removes_is_created_again(read: Reader, tmp_path: Path) -> None:
    files = EventFiles()
    files.write(Scalars(str(tmp_path / "logs"), [point(1)]))
    [file] = files_in(tmp_path)
    file.unlink()
    for folder in (file.parent, file.parent.parent, file.parent.parent.parent):
        folder.rmdir()
    assert files.write(Scalars(str(tmp_path / "logs"), [point(2)])) == f"{file}: No such file or directory"
    assert files.write(Scalars(str(tmp_path / "logs"), [point(3)])) is None
    assert [step for _, step, _ in read(file.parent)["own"]] == [3]


def test_an_unwritable_event_folder_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "distlaunch").write_text("not a folder")
    files = EventFiles()
    said = [files.write(Scalars(str(tmp_path), [point(step)])) for step in range(3)]
    assert said == [f"{tmp_path}/distlaunch: Not a directory", None, None]


def test_an_event_file_has_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "FILE_LIMIT", 500)
    files = EventFiles()
    for step in range(50):
        assert files.write(Scalars(str(tmp_path), [point(step)])) is None
    [file] = files_in(tmp_path)
    assert 300 < file.stat().st_size <= 500


def test_many_event_files_need_few_descriptors(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    points = [point(1, f"distlaunch/worker-{number}") for number in range(300)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(len(open_descriptors()) + 200, hard), hard))
    try:
        assert EventFiles().write(Scalars(str(tmp_path), points)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(files_in(tmp_path)) == 300


@pytest.mark.parametrize("folder", ["", "..", "distlaunch/../..", "/etc", "distlaunch/worker-0/..", "a/b/c-1"])
def test_no_scalar_order_can_leave_the_log_directory(folder: str) -> None:
    frame = encode(Scalars("/logs", [ScalarPoint(folder, 1, 1.0, {})]))
    with pytest.raises(ProtocolError, match="is not a folder of event files"):
        [*Decoder().feed(frame)]


# --- what is sent ---


def state_of(task: str, step: int | None, **seconds: float) -> TaskState:
    return TaskState(task=task, node="gpu-a", state="training", step=step, metrics={}, gpus=[], **seconds)  # type: ignore[arg-type]


def test_points_have_the_step_time_of_tasks_and_goodput_of_the_run() -> None:
    status = make_status(
        state_of("worker:0", 7, step_s=0.5, own_s=0.125),
        state_of("worker:1", 6, step_s=0.5, data_s=0.25),
        now=50.0,
        goodput=Goodput(training_s=3.0, share=0.75),
    )
    first, second, run = make_points(status, {})
    assert (first.folder, first.step, first.time) == ("distlaunch/worker-0", 7, 50.0)
    assert first.values == {
        "distlaunch/step_seconds": 0.5,
        "distlaunch/own_seconds": 0.125,
        "distlaunch/waiting_seconds": 0.375,
    }
    assert second.values == {"distlaunch/step_seconds": 0.5, "distlaunch/data_seconds": 0.25}
    assert (run.folder, run.step, run.values["goodput/share"]) == ("distlaunch", 7, 0.75)
    assert run.values["goodput/training_seconds"] == 3.0


def test_a_task_without_a_new_step_has_no_new_point() -> None:
    status = make_status(
        state_of("worker:0", 7, step_s=0.5), state_of("worker:1", None, step_s=0.5), state_of("ps:0", 7)
    )
    assert [point.folder for point in make_points(status, {})] == ["distlaunch/worker-0"]
    assert [*make_points(status, {"worker:0": 7})] == []


class Links:
    """The links to a node that answers or is silent."""

    def __init__(self, heard: bool) -> None:
        self.heard = heard
        self.sent: list[tuple[str, Scalars]] = []

    def is_heard(self, node: str) -> bool:
        return self.heard

    def send(self, node: str, order: Scalars) -> None:
        self.sent.append((node, order))


ENDED = AttemptEnded(
    AttemptReport(
        attempt=1, started=1.0, ended=2.0, tasks=[], verdict=Verdict(reference="a", message="b"), processes_left=0
    )
)


@pytest.mark.parametrize(
    ("heard", "tasks", "sent"),
    [
        (True, ["worker:0", "tensorboard:0"], [("gpu-a", ["distlaunch/worker-0"])]),
        (True, ["worker:0"], []),
        (False, ["worker:0", "tensorboard:0"], []),
    ],
    ids=["heard", "without-tensorboard", "silent"],
)
def test_the_last_points_of_an_attempt_are_sent_to_the_tensorboard_node(
    heard: bool, tasks: list[str], sent: list[tuple[str, list[str]]], tmp_path: Path
) -> None:
    status = make_status(*(state_of(task, 7 if task == "worker:0" else None, step_s=0.5) for task in tasks))
    journal, links = Journal(tmp_path / "events.jsonl", lambda: 1.0), Links(heard)
    sender = ScalarSender("/logs", lambda: status, journal, cast(NodeLinks, links))
    with closing(journal), closing(sender):
        sender.begin()
        for _ in range(2):  # a step is sent once
            journal.write(ENDED)
    assert [(node, [point.folder for point in order.points]) for node, order in links.sent] == sent


def test_a_scalar_order_of_the_longest_points_fits_in_a_frame() -> None:
    values = dict.fromkeys(["distlaunch/waiting_seconds", *(f"distlaunch/{name}_seconds" for name in "abc")], 1 / 3)
    points = [ScalarPoint("distlaunch/evaluator-100000", 1 << 52, 1.8e9 + 1 / 3, values)] * POINTS
    frame = encode(Scalars("/" + "x" * 4000, points))
    assert len(frame) < FRAME_LIMIT
    assert [*Decoder().feed(frame)] == [(Scalars("/" + "x" * 4000, points), b"")]


def test_event_files_can_be_written_on_python_39(tmp_path: Path, python39: str) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom worker_entry.agent.tensorboard import EventFiles\n"
        "from worker_entry.protocol.orders import Scalars\nfrom worker_entry.protocol.orders import ScalarPoint\n"
        "print(EventFiles().write(Scalars(sys.argv[2], [ScalarPoint('distlaunch', 1, 1.0, {'a': 1.0})])))\n"
    )
    done = subprocess.run(
        [python39, "-I", "-S", "-c", script, str(ROOT), str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert done.stdout == "None\n"
    [file] = files_in(tmp_path)
    assert os.stat(file).st_size > 30
