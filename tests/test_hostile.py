"""Whatever a node sends, the run goes on or ends with its report; for longer in `tests.benchmarks.hostile`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.apart import linux
from tests.hostile_nodes import Tally, noting_threads, run_once
from tests.hostile_orders import Abused

SECONDS = 5.0


def test_no_frame_of_a_node_raises_in_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", None)  # restored at the end
    tally = Tally()
    noting_threads(tally)
    began, seed = time.monotonic(), 0
    while time.monotonic() - began < SECONDS and seed < 500:
        report = run_once(tmp_path / str(seed), seed, 5, tally)
        written = json.loads((tmp_path / str(seed) / "report.json").read_text(encoding="utf-8"))
        assert len(written["attempts"]) == len(report.attempts)
        assert report.outcome == "failed"
        assert report.exit_status in (1, 2, 3)
        assert not (tmp_path / str(seed) / "attempt-1000").exists()
        seed += 1
    assert tally.bugs == []
    assert tally.frames > 100


@linux
def test_no_order_of_a_controller_raises_in_the_agent(tmp_path: Path) -> None:
    began, seed, taken = time.monotonic(), 0, 0
    while time.monotonic() - began < SECONDS / 2:
        abused = Abused(tmp_path / str(seed), seed, 0.002)
        abused.feed(1000)
        assert abused.end() == ""
        seed, taken = seed + 1, taken + abused.taken
        assert abused.peak_kib < 64 << 10
    assert taken >= 100
