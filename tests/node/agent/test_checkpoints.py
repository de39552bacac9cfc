"""A checkpoint that a task saves is reported once, after it is completely written."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from tests.harness.processes.commands import Distlaunch
from worker_entry.agent.tasks.watches import LOOK_S, QUIET_S, CheckpointWatch
from worker_entry.system import clock
from worker_entry.system.agent_kernel import SystemKernel


def save(path: Path, moment: float) -> None:
    path.write_text("weights")
    os.utime(path, (moment, moment))


def test_only_new_and_stable_checkpoint_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file server's clock is ahead of ours, so no file seems to be old."""
    monkeypatch.setattr(clock, "now", lambda: 0.0)
    save(tmp_path / "old", 1000)
    watch = CheckpointWatch(SystemKernel())
    watch.begin(str(tmp_path))
    looks = iter(range(1, 100))

    def look() -> list[tuple[str, float]]:
        saved = watch.poll(next(looks) * LOOK_S)
        return [(saved.name, saved.time)] if saved is not None else []

    assert look() == []
    save(tmp_path / "ckpt-1", 2000)
    assert look() == []  # the file may still be growing
    save(tmp_path / "ckpt-1", 2001)
    assert look() == []
    assert look() == [("ckpt-1", 2001.0)]
    assert look() == []
    save(tmp_path / "ckpt-1", 3000)  # a program may write to the same name again
    assert [look(), look(), look()] == [[], [("ckpt-1", 3000.0)], []]


def test_checkpoints_that_are_saved_faster_than_polled_are_reported_once_stable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = CheckpointWatch(SystemKernel())
    watch.begin(str(tmp_path))
    ages = []
    for number in range(1, 41):
        now = 1000 + LOOK_S * number
        last = now - now % 0.9  # it saves every 0.9 s
        save(tmp_path / "backup", last)
        monkeypatch.setattr(clock, "now", partial(float, now))
        if watch.poll(LOOK_S * number) is not None:
            ages.append(now - last)
    assert min(ages) >= QUIET_S
    assert len(ages) > 10


def test_a_missing_checkpoint_directory_has_no_checkpoints_until_it_exists(tmp_path: Path) -> None:
    for directory in ("", str(tmp_path / "missing")):
        watch = CheckpointWatch(SystemKernel())
        watch.begin(directory)
        assert watch.poll(1e9) is None
    (tmp_path / "missing").mkdir()
    save(tmp_path / "missing" / "first", 5)
    saved = watch.poll(1e9 + LOOK_S)
    assert saved is not None
    assert saved.name == "first"


def test_the_journal_of_a_run_records_each_checkpoint(distlaunch: Distlaunch) -> None:
    save_one = "touch $DISTLAUNCH_CHECKPOINT_DIR/ckpt-7; sleep 7"
    ran = distlaunch("local", "-n", "1", "--", "sh", "-c", f"mkdir -p $DISTLAUNCH_CHECKPOINT_DIR; {save_one}")
    lines = [json.loads(line) for line in (ran.directory / "events.jsonl").read_bytes().splitlines()]
    assert [line["name"] for line in lines if line["event"] == "checkpoint"] == ["ckpt-7"]
