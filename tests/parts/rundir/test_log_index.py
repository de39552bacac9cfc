"""The index of a log: which times it records for lines, and how it survives failures and damage."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.rundir.logs import LogFile
from launcher.tasks import TaskId
from launcher.transports.log_mirror import LogMirror
from worker_entry.agent.tasks.log import TaskLog
from worker_entry.protocol.log_index import MARKS, RECORD, RESTART, SUFFIX, LogIndex, Mark, parse_index
from worker_entry.protocol.messages import Log
from worker_entry.system import clock

TASK = TaskId("worker", 0)


def read_marks(path: Path) -> list[tuple[int, float]]:
    offsets, micros = parse_index(path.read_bytes())
    return [(offset, moment / 1e6) for offset, moment in zip(offsets, micros, strict=True)]


def read_times(path: Path) -> list[tuple[bytes, float | None]]:
    """The lines of a finished log, each with its time."""
    log = LogFile(TASK, path)
    blocks = [*log.blocks(None)]
    rest = log.rest()
    log.close()
    return [
        (line, block.time)
        for block in [*blocks, *([rest] if rest is not None else [])]
        for line in block.data.splitlines(keepends=True)
    ]


# --- the file ---


@given(st.lists(st.tuples(st.integers(0, 1 << 50), st.floats(0, 4e9))))
def test_log_index_offsets_round_trip_with_increasing_times(notes: list[tuple[int, float]]) -> None:
    folder = Path(os.environ["PYTEST_TMP"])
    path = folder / f"{next(_numbers)}.index"
    index = LogIndex(str(path))
    for offset, moment in notes:
        index.note(offset, moment)
    marks = index.read(0, 1000)
    index.close()
    assert read_marks(path) == [(mark.offset, mark.time) for mark in marks]
    moments = [mark.time for mark in marks if mark.offset != RESTART]
    assert moments == sorted(moments)
    expected = [offset for offset, _ in itertools.groupby([0, *(offset for offset, _ in notes)])][1:]
    assert [mark.offset for mark in marks if mark.offset != RESTART] == expected
    for before, mark in itertools.pairwise(marks):
        assert mark.offset > before.offset or mark.offset == RESTART


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))


@pytest.mark.parametrize("cut", range(1, RECORD.size))
def test_an_incomplete_log_index_record_is_ignored_and_overwritten(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "index"
    index = LogIndex(str(path))
    index.note(10, 100.0)
    index.note(20, 101.0)
    index.close()
    os.truncate(path, 2 * RECORD.size - cut)
    assert read_marks(path) == [(10, 100.0)]
    again = LogIndex(str(path))
    assert (again.offset, again.time, again.count) == (10, 100.0, 1)
    again.note(30, 102.0)
    again.close()
    assert read_marks(path) == [(10, 100.0), (30, 102.0)]


def test_a_log_index_that_cannot_be_written_is_omitted_without_an_error(tmp_path: Path) -> None:
    index = LogIndex(str(tmp_path / "missing" / "index"))
    index.note(10, 100.0)
    assert (index.offset, index.count, index.read(0, 10)) == (10, 0, [])
    index.close()


def test_log_index_marks_are_found_by_offset_since_the_last_truncation(tmp_path: Path) -> None:
    index = LogIndex(str(tmp_path / "index"))
    for offset in (100, 200, 50, 150, 250):
        index.note(offset, 1.0)
    assert [index.find(offset) for offset in (0, 49, 50, 149, 150, 249, 250, 999)] == [3, 3, 4, 4, 5, 5, 6, 6]
    index.close()


def _last_marks(path: Path) -> list[tuple[int, float]]:
    marks = read_marks(path)
    cut = max((number for number, (offset, _) in enumerate(marks) if offset == RESTART), default=-1)
    return marks[cut + 1 :]


# --- the agent ---


@dataclass
class Clocks:
    """Both clocks of a node: the steady one is `ahead` of the machine's, which shows `wall`."""

    wall: float
    ahead: float = 1000.0

    def time(self) -> float:
        return self.wall

    def now(self) -> float:
        return self.wall + self.ahead


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks(1.7e9)
    monkeypatch.setattr("worker_entry.agent.tasks.log.time", clocks)
    return clocks


def test_log_lines_have_the_time_at_which_they_were_written(tmp_path: Path, clocks: Clocks) -> None:
    """The agent reads the log later, but the file system has the time of the last write."""
    path = tmp_path / "log"
    path.touch()
    log = TaskLog(str(path), f"{path}{SUFFIX}", clocks.now)
    for number in range(3):
        with path.open("ab") as file:
            file.write(b"%d\n" % number)
        os.utime(path, (clocks.wall, clocks.wall + 0.2))
        clocks.wall += 0.5
        log.observe()
    log.close()
    began = 1.7e9 + clocks.ahead
    assert read_times(path) == [(b"0\n", began + 0.2), (b"1\n", began + 0.7), (b"2\n", began + 1.2)]


@pytest.mark.parametrize(("says", "noted"), [(0.0, 0.0), (1e10, 0.5)])
def test_a_wrong_file_system_clock_moves_no_mark_out_of_its_interval(
    tmp_path: Path, clocks: Clocks, says: float, noted: float
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x\n")
    began = clocks.now()
    log = TaskLog(str(path), f"{path}{SUFFIX}", clocks.now)
    os.utime(path, (says, says))
    clocks.wall += 0.5
    log.observe()
    log.close()
    assert read_times(path) == [(b"x\n", began + noted)]


def test_the_index_of_a_constantly_growing_log_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    log = TaskLog(str(path), f"{path}{SUFFIX}", clock.now)
    started = time.monotonic()
    with path.open("ab", buffering=0) as file:
        for _ in range(3000):
            file.write(b"line\n")
            log.observe()
    log.close()
    assert 1 <= len(read_marks(Path(f"{path}{SUFFIX}"))) <= (time.monotonic() - started) / 0.05 + 2


def mirror_of(tmp_path: Path) -> tuple[LogMirror, Path]:
    return LogMirror(lambda attempt, task: tmp_path / "mirror.log"), tmp_path / "mirror.log"


@given(
    pieces=st.lists(st.one_of(st.binary(max_size=40), st.just(None)), max_size=20),
    rewinds=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 20)), max_size=4),
)
def test_a_log_mirror_has_the_same_marks_despite_resent_pieces(
    pieces: list[bytes | None], rewinds: list[tuple[int, int]]
) -> None:
    """A piece that is None stands for the program truncating its log."""
    folder = Path(os.environ["PYTEST_TMP"]) / str(next(_numbers))
    folder.mkdir()
    path = folder / "log"
    path.touch()
    log, (mirror, mirrored) = TaskLog(str(path), f"{path}{SUFFIX}", clock.now), mirror_of(folder)
    sent = 0

    def send() -> int:
        nonlocal sent
        while True:
            offset, data, _, marks = log.read()
            if not data and not marks:
                return sent
            assert all(mark.offset <= offset + len(data) for mark in marks)
            mirror.write(Log(1, "worker:0", offset, len(data), marks), bytes(data))
            sent = offset + len(data)

    for number, piece in enumerate(pieces):
        if piece is None:
            os.truncate(path, 0)
        else:
            with path.open("ab") as file:
                file.write(piece)
        send()
        for offset, at in rewinds:
            if at == number:
                log.rewind(min(offset, sent))
                send()
    log.close()
    mirror.close()
    last = max((number for number, piece in enumerate(pieces) if piece is None), default=-1)
    content = b"".join(piece or b"" for piece in pieces[last + 1 :])
    assert path.read_bytes() == content
    if mirrored.exists():
        assert mirrored.read_bytes()[: len(content)] == content
    here, there = Path(f"{path}{SUFFIX}"), Path(f"{mirrored}{SUFFIX}")
    if there.exists():  # since the log was last cut, nothing is missing and nothing is doubled
        assert _last_marks(there) == _last_marks(here)
    if content:
        assert there.exists()
        assert read_marks(there)[-1][0] == len(content)


def test_a_log_piece_has_no_more_marks_than_a_frame_allows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    log = TaskLog(str(path), f"{path}{SUFFIX}", clock.now)
    for _ in range(3 * MARKS):  # while the connection is broken
        with path.open("ab") as file:
            file.write(b"line\n")
        log.observe(last=True)
    found = []
    while (piece := log.read()).data:
        assert 0 < len(piece.marks) <= MARKS
        found += piece.marks
    log.close()
    assert [mark.offset for mark in found] == [5 * number for number in range(1, 3 * MARKS + 1)]


def test_log_times_are_corrected_and_never_ahead_of_the_controller_clock(tmp_path: Path) -> None:
    mirror, path = mirror_of(tmp_path)
    now = time.time()
    mirror.write(Log(1, "worker:0", 0, 2, [Mark(2, now - 100 + 5000)]), b"a\n", 5000.0)
    mirror.write(Log(1, "worker:0", 2, 2, [Mark(4, 1e14)]), b"b\n", 5000.0)
    mirror.close()
    (_, first), (_, second) = read_marks(Path(f"{path}{SUFFIX}"))
    assert first == pytest.approx(now - 100, abs=0.01)
    assert now - 1 < second <= time.time() + 1


# --- the reader ---


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda text: text.replace(b"\n", b"")), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 300), max_size=30),
    reads=st.lists(st.integers(0, 300), max_size=5),
    ends=st.booleans(),
)
def test_the_log_reader_returns_every_line_with_the_time_of_its_end(
    lines: list[bytes], cuts: list[int], reads: list[int], ends: bool
) -> None:
    path = Path(os.environ["PYTEST_TMP"]) / f"{next(_numbers)}.log"
    content = b"\n".join(lines) + (b"\n" if ends else b"")
    index = LogIndex(f"{path}{SUFFIX}")
    marks = []
    for number, offset in enumerate(sorted({min(cut, len(content)) for cut in (*cuts, len(content))} - {0}), 1):
        index.note(offset, float(number))
        marks.append(Mark(offset, float(number)))
    index.close()
    path.touch()
    log = LogFile(TASK, path)
    got = []
    for size in [*sorted(min(size, len(content)) for size in reads), len(content)]:
        path.write_bytes(content[:size])
        got += [*log.blocks(None)]
    rest = log.rest()
    got += [rest] if rest is not None else []
    log.close()
    assert b"".join(block.data for block in got) == content + (b"" if content.endswith(b"\n") or not content else b"\n")
    times = [block.time for block in got for _ in range(block.data.count(b"\n"))]
    ends_of_lines = [place + 1 for place in range(len(content)) if content[place : place + 1] == b"\n"]
    if content and not content.endswith(b"\n"):
        ends_of_lines.append(len(content))
    assert times == [next(mark.time for mark in marks if mark.offset >= end) for end in ends_of_lines]


def test_a_truncated_log_has_the_times_of_its_current_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    index = LogIndex(f"{path}{SUFFIX}")
    for offset, moment in ((100, 1.0), (200, 2.0), (4, 3.0), (8, 4.0)):
        index.note(offset, moment)
    index.close()
    path.write_bytes(b"new\nold\n")
    assert read_times(path) == [(b"new\n", 3.0), (b"old\n", 4.0)]


@pytest.mark.parametrize("damage", [b"", b"garbage", os.urandom(160), b"\xff" * 64, bytes(64)])
def test_a_damaged_log_index_loses_times_but_no_lines(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree")
    Path(f"{path}{SUFFIX}").write_bytes(damage)
    assert [line for line, _ in read_times(path)] == [b"one\n", b"two\n", b"three\n"]


def test_the_log_reader_splits_very_long_lines_and_skips_holes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"x" * 3_000_000 + b"\nend\n")
        file.truncate(1 << 40)
        file.seek(1 << 40)
        file.write(b"after\n")
    lines = [line for line, _ in read_times(path)]
    assert b"".join(line.rstrip(b"\n") for line in lines[:-3]) == b"x" * 3_000_000
    assert max(map(len, lines)) < 2 << 20
    assert lines[-3:-1] == [b"end\n", b"(1 TiB of zeros left out)\n"]
    assert lines[-1].lstrip(b"\0") == b"after\n"
