"""Samples are written to files that stay small and readable; rates follow from two samples."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.controller.usage import Usage
from launcher.plan.paths import RunPaths
from launcher.report.samples import (
    NodeUseSample,
    ProgressSample,
    Sample,
    TaskUseSample,
    kind_of,
    parse_samples,
    render_sample,
    sample_progress,
    use_of_node,
    use_of_task,
)
from launcher.rundir.samples import HARD_LIMIT, LIMIT, RECENT, SampleFiles, thin_lines
from launcher.tasks import parse_task_id
from tests.harness.apart import linux
from tests.harness.places import ROOT
from worker_entry.protocol.messages import Sampled
from worker_entry.protocol.samples import GpuSample, NodeSample, TaskSample
from worker_entry.protocol.values import EpochEnd, Progress

TASK = parse_task_id("worker:0")
WEEK_S = 7 * 86_400

amounts = st.floats(0, 1e14, allow_nan=False)
counts = st.integers(0, 1 << 53)
times = st.floats(0, 4e9)
some = st.none() | amounts
task_uses = st.builds(
    TaskUseSample,
    times,
    st.builds(TaskSample, st.just("worker:0"), amounts, counts, some, counts, counts, counts, counts),
)
gpus = st.lists(st.builds(GpuSample, st.text(max_size=9), some, counts, counts, some, some), max_size=3)
node_uses = st.builds(
    NodeUseSample,
    times,
    st.text(max_size=20),
    st.builds(NodeSample, amounts, counts, counts, counts, counts, counts, gpus),
)
metrics = st.dictionaries(st.text(max_size=9), st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=3)
progress = st.builds(ProgressSample, times, counts, st.none() | counts, some, some, some, metrics)
samples: st.SearchStrategy[Sample] = st.one_of(progress, task_uses, node_uses)


def task_use(time: float, **values: float) -> TaskUseSample:
    return TaskUseSample(time, TaskSample("worker:0", **{"cpu_s": 0.0, "memory": 1, **values}))  # type: ignore[arg-type]


def node_use(time: float, node: str = "gpu-a", cpu_s: float = 0.0, received: int = 0) -> NodeUseSample:
    return NodeUseSample(time, node, NodeSample(cpu_s, 4, 10, 100, received))


def reported(step: int, time: float) -> Progress:
    return Progress(step=step, first_step=1 if step else None, time=time, batches=step, began=0.0)


# --- lines ---


class TestLines:
    @given(st.lists(samples, max_size=5))
    def test_samples_round_trip_through_their_lines(self, written: list[Sample]) -> None:
        lines = [render_sample(sample) for sample in written]
        assert all(line.count(b"\n") == 1 and line.endswith(b"\n") for line in lines)
        assert [*parse_samples(lines)] == written

    @given(st.lists(samples, min_size=1, max_size=5), st.data())
    def test_an_incomplete_sample_line_does_not_affect_other_lines(
        self, written: list[Sample], data: st.DataObject
    ) -> None:
        lines = [render_sample(sample) for sample in written]
        torn = data.draw(st.integers(0, len(lines) - 1))
        lines[torn] = lines[torn][: data.draw(st.integers(0, len(lines[torn]) - 2))]
        assert [*parse_samples(lines)] == [sample for number, sample in enumerate(written) if number != torn]

    @given(
        st.binary()
        | st.binary().map(b'{"sample":"use"'.__add__)
        | st.text().map(lambda text: json.dumps(text).encode())
    )
    def test_lines_that_are_not_samples_are_ignored(self, line: bytes) -> None:
        assert [*parse_samples([line])] == []

    @pytest.mark.parametrize(
        "line",
        [
            b'{"sample":"use","time":1}',
            b'{"sample":"later","time":1,"use":{}}',
            b'{"sample":"progress","time":"soon","step":1}',
            b'{"sample":"progress","time":1,"step":[1]}',
            b'{"time":1,"step":1,"sample":"progress"}',
        ],
    )
    def test_sample_lines_with_wrong_fields_are_ignored(self, line: bytes) -> None:
        assert [*parse_samples([line])] == []

    def test_unknown_fields_of_a_sample_are_ignored(self) -> None:
        [sample] = parse_samples([b'{"sample":"progress","time":1,"step":2,"mood":"good"}'])
        assert sample == ProgressSample(1.0, 2)

    def test_a_sample_line_omits_empty_fields(self) -> None:
        assert render_sample(ProgressSample(2.5, 7)) == b'{"sample":"progress","time":2.5,"step":7}\n'

    def test_a_progress_sample_has_the_values_that_the_task_reported(self) -> None:
        progress = replace(reported(7, 3.0), epoch=2, step_s=0.5, own_s=0.25, data_s=0.125, metrics={"a": None})
        assert sample_progress(progress) == ProgressSample(3.0, 7, 2, 0.5, 0.25, 0.125, {"a": None})


# --- rates ---


class TestRates:
    def test_a_rate_is_the_growth_of_a_counter_per_second(self) -> None:
        use = use_of_task(
            task_use(10.0, cpu_s=1.0, starved_s=0.5, read=100, written=0),
            task_use(14.0, cpu_s=9.0, starved_s=1.5, read=500, written=2, memory=7, swapped=3, threads=5),
        )
        assert (use.cpu, use.starved, use.read_s, use.written_s) == (2.0, 0.25, 100.0, 0.5)
        assert (use.time, use.memory, use.swapped, use.threads) == (14.0, 7, 3, 5)

    def test_a_single_sample_has_no_rate(self) -> None:
        use, node = use_of_task(None, task_use(1.0)), use_of_node(None, node_use(1.0))
        assert (use.cpu, use.starved, use.read_s, use.written_s, node.cpu, node.received_s) == (None,) * 6

    def test_values_that_the_kernel_does_not_count_have_no_rate(self) -> None:
        assert use_of_task(task_use(1.0), task_use(2.0)).starved is None
        assert use_of_task(task_use(1.0), task_use(2.0, starved_s=1.0)).starved is None

    @pytest.mark.parametrize("time", [1.0, 0.5])
    def test_simultaneous_or_unordered_samples_have_no_rate(self, time: float) -> None:
        assert use_of_task(task_use(1.0), task_use(time, cpu_s=1.0)).cpu is None

    def test_a_restarted_task_has_no_negative_rate(self) -> None:
        use = use_of_task(task_use(1.0, cpu_s=50.0, read=9), task_use(2.0, cpu_s=0.5, read=3))
        assert (use.cpu, use.read_s) == (0.0, 0.0)

    @given(task_uses, task_uses)
    def test_rates_of_samples_are_never_negative(self, before: TaskUseSample, after: TaskUseSample) -> None:
        use = use_of_task(before, after)
        assert all(rate is None or rate >= 0 for rate in (use.cpu, use.starved, use.read_s, use.written_s))

    def test_rates_of_a_node_are_the_growth_of_its_counters(self) -> None:
        use = use_of_node(node_use(1.0), node_use(3.0, cpu_s=5.0, received=10))
        assert (use.cpu, use.received_s, use.sent_s, use.sample.memory) == (2.5, 5.0, 0.0, 10)


# --- the controller's view ---


class TestUsage:
    @pytest.fixture
    def uses(self, tmp_path: Path) -> Usage:
        return Usage(SampleFiles(RunPaths(tmp_path), 1))

    def test_usage_keeps_the_last_samples_and_writes_all_to_files(self, uses: Usage, tmp_path: Path) -> None:
        for second in range(3):
            tasks = [TaskSample("worker:0", second * 2.0, 5), TaskSample("ps:1", second * 1.0, 6)]
            uses.note("gpu-a", Sampled(100.0 + second, tasks, NodeSample(second * 3.0, 4, 1, 2)), 40.0)
        assert {str(task): (use.cpu, use.memory, use.time) for task, use in uses.tasks.items()} == {
            "worker:0": (2.0, 5, 62.0),
            "ps:1": (1.0, 6, 62.0),
        }
        assert {node: use.cpu for node, use in uses.nodes.items()} == {"gpu-a": 3.0}
        for name in ("worker-0", "ps-1", "nodes"):
            lines = (tmp_path / "attempt-1" / f"{name}.samples.jsonl").read_bytes().splitlines()
            assert [sample.time for sample in parse_samples(lines)] == [60.0, 61.0, 62.0]

    def test_a_node_without_a_sample_has_only_the_usage_of_its_tasks(self, uses: Usage) -> None:
        uses.note("gpu-a", Sampled(1.0, [TaskSample("worker:0", 1.0, 5)]), 0.0)
        assert (len(uses.tasks), len(uses.nodes)) == (1, 0)

    def test_a_task_has_no_progress_samples_before_its_first_step(self, uses: Usage, tmp_path: Path) -> None:
        uses.note_progress(TASK, reported(0, 1.0))
        assert not RunPaths(tmp_path).samples(1, TASK).exists()
        uses.note_progress(TASK, reported(1, 2.0))
        assert [*parse_samples(RunPaths(tmp_path).samples(1, TASK).open("rb"))] == [ProgressSample(2.0, 1)]

    def test_views_of_usage_are_copies(self, uses: Usage) -> None:
        seen = uses.tasks
        uses.note("gpu-a", Sampled(1.0, [TaskSample("worker:0", 1.0, 5)]), 0.0)
        assert (len(seen), len(uses.tasks)) == (0, 1)


# --- thinning ---


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


class TestThinning:
    @given(st.lists(samples, max_size=60), st.integers(0, 2000))
    def test_thinning_keeps_the_order_and_the_first_and_newest_samples(self, written: list[Sample], size: int) -> None:
        lines = [render_sample(sample) for sample in written]
        data = b"".join(lines)
        left = lines_of(thin_lines(data, size))
        remaining = iter(lines)
        assert all(line in remaining for line in left)
        newest = data[int(len(data) * (1 - RECENT)) :].partition(b"\n")[2]
        assert b"".join(left).endswith(newest)
        assert left[:1] == lines[:1]
        assert {kind_of(line) for line in left} == {kind_of(line) for line in lines}

    def test_thinning_keeps_an_equal_share_of_every_kind_and_node(self) -> None:
        data = b"".join(
            render_sample(sample)
            for second in range(2000)
            for sample in (
                node_use(second, "gpu-a"),
                node_use(second, 'gpu-"b"'),
                task_use(second),
                ProgressSample(second, second),
            )
        )
        left = [*parse_samples(lines_of(thin_lines(data, len(data) // 4)))]
        for chosen in (
            [s for s in left if isinstance(s, NodeUseSample) and s.node == "gpu-a"],
            [s for s in left if isinstance(s, NodeUseSample) and s.node == 'gpu-"b"'],
            [s for s in left if isinstance(s, TaskUseSample)],
            [s for s in left if isinstance(s, ProgressSample)],
        ):
            old = [sample.time for sample in chosen if sample.time < 1400]
            assert old == [*range(0, 1400, 4)]
            assert [sample.time for sample in chosen if sample.time >= 1520] == [*range(1520, 2000)]

    def test_repeated_thinning_keeps_older_samples_evenly_spaced(self) -> None:
        data, limit = b"", 40_000
        for second in range(20_000):
            data += render_sample(task_use(second))
            if len(data) > limit:
                data = thin_lines(data, limit // 2)
        times = [sample.time for sample in parse_samples(lines_of(data))]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert times[0] == 0
        assert times[-1] == 19_999
        assert max(gaps) <= 4 * max(gaps[: len(gaps) // 4])
        assert gaps[-1] == 1

    def test_thinning_removes_incomplete_and_invalid_lines(self) -> None:
        good = [render_sample(task_use(second)) for second in range(100)]
        strange = [b"\n", b'{"sample":"use","ti', b"\xff\0\n", b'{"sample":"use","time":1e999,"use":{}}\n', b"[]\n"]
        left = thin_lines(b"".join([*strange, *good]), 1 << 20)
        assert left == b"".join(good)

    @pytest.mark.parametrize("data", [b"", b"\n", b"x", b'{"sample":"use","time":1'])
    def test_thinning_accepts_data_without_a_complete_sample(self, data: bytes) -> None:
        assert thin_lines(data, 0) in (data, b"")


# --- files ---


def write_seconds(files: SampleFiles, seconds: Iterable[int]) -> None:
    for second in seconds:
        step = ProgressSample(1.76e9 + second, second, second // 100, 0.123456789, 0.045678912, None, {"loss": 0.12345})
        files.write_progress(TASK, step)
        files.write_use(TASK, task_use(1.76e9 + second, cpu_s=second * 1.25, starved_s=second * 0.125, read=10**11))


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Within the block, no file can grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return RunPaths(tmp_path).samples(1, TASK)


class TestFiles:
    def test_samples_of_a_week_at_one_per_second_stay_below_20_mb(self, tmp_path: Path, path: Path) -> None:
        # A 64th of the week, and of the limit: thinning does the same at any scale.
        files = SampleFiles(RunPaths(tmp_path), 1, LIMIT // 64)
        largest = 0
        for second in range(0, WEEK_S // 64, 50):
            write_seconds(files, range(second, second + 50))
            files.wait()
            largest = max(largest, path.stat().st_size)
        assert largest * 64 < 15e6
        assert LIMIT * HARD_LIMIT < 20e6
        left = [*parse_samples(path.open("rb"))]
        for kind in (ProgressSample, TaskUseSample):
            times = [sample.time - 1.76e9 for sample in left if isinstance(sample, kind)]
            assert times[0] == 0
            assert times[-1] >= WEEK_S // 64 - 1
            assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 64
        assert [each.name for each in path.parent.iterdir()] == [path.name]

    def test_samples_written_during_thinning_are_kept(
        self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = SampleFiles(RunPaths(tmp_path), 1, 20_000)

        def thin_late(data: bytes, size: int) -> bytes:
            write_seconds(files, range(1000, 1003))
            return thin_lines(data, size)

        monkeypatch.setattr("launcher.rundir.samples.thin_lines", thin_late)
        second = 0
        while files._open.get(path) is None or files._open[path]._thread is None:
            write_seconds(files, [second])
            second += 1
        files.wait()
        times = [sample.time - 1.76e9 for sample in parse_samples(path.open("rb"))]
        assert [time for time in times if time >= 1000] == [1000, 1000, 1001, 1001, 1002, 1002]
        assert len(times) < 2 * second

    def test_progress_samples_are_written_once_a_second_and_only_on_progress(self, tmp_path: Path, path: Path) -> None:
        files = SampleFiles(RunPaths(tmp_path), 1)
        for time, step in [(1.0, 1), (1.5, 2), (2.0, 3), (2.9, 4), (9.0, 3), (19.0, 3), (20.0, 4)]:
            files.write_progress(TASK, ProgressSample(time, step))
        assert [(s.time, s.step) for s in parse_samples(path.open("rb")) if isinstance(s, ProgressSample)] == [
            (1.0, 1),
            (2.0, 3),
            (20.0, 4),
        ]

    def test_sample_files_are_private(self, tmp_path: Path, path: Path) -> None:
        SampleFiles(RunPaths(tmp_path / "run"), 1).write_use(TASK, task_use(1.0))
        mine = RunPaths(tmp_path / "run").samples(1, TASK)
        assert (mine.stat().st_mode & 0o777, mine.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    def test_an_incomplete_sample_of_a_killed_controller_affects_no_other_sample(
        self, tmp_path: Path, path: Path
    ) -> None:
        SampleFiles(RunPaths(tmp_path), 1).write_use(TASK, task_use(1.0))
        with path.open("ab") as stream:
            stream.write(b'{"sample":"use","time":2')
        SampleFiles(RunPaths(tmp_path), 1).write_use(TASK, task_use(3.0))
        assert [sample.time for sample in parse_samples(path.open("rb"))] == [1.0, 3.0]

    @linux
    def test_a_full_disk_loses_only_samples(self, tmp_path: Path, path: Path) -> None:
        files = SampleFiles(RunPaths(tmp_path), 1, 1 << 20)
        write_seconds(files, range(10))
        size = path.stat().st_size
        with file_limit(size + 100):  # the kernel then writes a part of a line, as on a full disk
            write_seconds(files, range(10, 20))
        assert size < path.stat().st_size <= size + 100
        write_seconds(files, range(20, 30))
        uses = [s.time - 1.76e9 for s in parse_samples(path.open("rb")) if isinstance(s, TaskUseSample)]
        assert uses == [*range(10), *range(20, 30)]

    @linux
    def test_a_sample_file_that_cannot_be_thinned_stops_growing(
        self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tried = []

        def refuse(descriptor: int) -> None:
            tried.append(descriptor)
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("launcher.rundir.samples.os.fsync", refuse)
        files = SampleFiles(RunPaths(tmp_path), 1, 10_000)
        for second in range(200):
            write_seconds(files, [second])
            files.wait()
        assert 15_000 <= path.stat().st_size < 15_500
        assert 2 <= len(tried) <= 10
        assert [each.name for each in path.parent.iterdir()] == [path.name]

    def test_a_folder_that_cannot_be_written_loses_only_samples(self, tmp_path: Path) -> None:
        (tmp_path / "attempt-1").write_text("no folder")
        write_seconds(SampleFiles(RunPaths(tmp_path), 1), range(3))
        assert (tmp_path / "attempt-1").read_text() == "no folder"

    @pytest.mark.parametrize("place", ["os.fsync", "Path.replace"])
    def test_sigkill_during_thinning_loses_no_samples(self, tmp_path: Path, path: Path, place: str) -> None:
        killed = (
            "import os, sys, signal\n"
            "from pathlib import Path\n"
            "from tests.parts.rundir.test_samples import RunPaths, SampleFiles, write_seconds\n"
            f"{place} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "write_seconds(SampleFiles(RunPaths(Path(sys.argv[1])), 1, 50_000), range(1000))\n"
        )
        done = subprocess.run([sys.executable, "-c", killed, str(tmp_path)], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        assert len([*path.parent.iterdir()]) == 2
        before = [*parse_samples(path.open("rb"))]
        assert [s.time - 1.76e9 for s in before if isinstance(s, TaskUseSample)][:100] == [*range(100)]
        files = SampleFiles(RunPaths(tmp_path), 1, 50_000)
        write_seconds(files, [999])
        files.wait()
        write_seconds(files, range(1000, 1002))
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        assert [s.time - 1.76e9 for s in parse_samples(path.open("rb"))][-4:] == [1000, 1000, 1001, 1001]


class TestProgress:
    """At most one sample per second, each end of an epoch, and the last step."""

    def steps(self, folder: Path) -> list[int]:
        samples = parse_samples(RunPaths(folder).samples(1, TASK).read_bytes().splitlines(keepends=True))
        return [sample.step for sample in samples if isinstance(sample, ProgressSample)]

    def progress(self, step: int, time: float, *, training: bool = True) -> Progress:
        return Progress(step, 1, step, 100.0, time, training)

    def test_each_end_of_an_epoch_is_a_progress_sample(self, tmp_path: Path) -> None:
        uses = Usage(SampleFiles(RunPaths(tmp_path), 1))
        for epoch in range(1, 9):
            at = 100.0 + epoch / 10
            uses.note_epochs(TASK, [EpochEnd(at + 5.0, 10 * epoch, epoch, {"loss": 1.0})], 5.0)
            uses.note_progress(TASK, self.progress(10 * epoch + 1, at))
        assert self.steps(tmp_path) == [10 * epoch for epoch in range(1, 9)]
        [first, *_] = parse_samples(RunPaths(tmp_path).samples(1, TASK).read_bytes().splitlines(keepends=True))
        assert first == ProgressSample(100.1, 10, 1, metrics={"loss": 1.0})

    def test_the_last_step_of_training_or_a_task_is_a_progress_sample(self, tmp_path: Path) -> None:
        uses = Usage(SampleFiles(RunPaths(tmp_path), 1))
        for step, time in ((1, 100.0), (2, 100.2), (9, 100.9)):
            uses.note_progress(TASK, self.progress(step, time))
        uses.end(TASK)
        assert self.steps(tmp_path) == [1, 9]
        uses.end(TASK)
        uses.note_progress(TASK, self.progress(10, 101.0, training=False))
        uses.end(TASK)
        assert self.steps(tmp_path) == [1, 9, 10]
