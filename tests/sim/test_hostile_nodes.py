"""Whatever a node sends, the run continues or ends with its report; `tests.benchmarks.hostile` tests for longer."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.apart import linux
from tests.sim.hostile_frames import RandomFrames
from tests.sim.hostile_nodes import Tally, noting_threads, run_once
from tests.sim.hostile_orders import Abused
from worker_entry.protocol.costs import COSTS
from worker_entry.protocol.framing import encode
from worker_entry.protocol.messages import Dialled, Exited, Inspected, KeptWarm, Log, Prepared, Refused, Stacks, Synced
from worker_entry.protocol.orders import Beat
from worker_entry.protocol.profiles import Profiled
from worker_entry.protocol.speed import LinkMeasured, NodeMeasured
from worker_entry.protocol.values import Problem, TaskExit

SECONDS = 5.0


def test_random_frames_from_a_node_never_crash_the_controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", None)  # restored at the end
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # a node may claim that its agent stays warm
    tally = Tally()
    noting_threads(tally)
    began, seed = time.monotonic(), 0
    while seed < 500 and (time.monotonic() - began < SECONDS or tally.frames <= 100):
        report = run_once(tmp_path / str(seed), seed, 5, tally)
        written = json.loads((tmp_path / str(seed) / "report.json").read_text(encoding="utf-8"))
        assert len(written["attempts"]) == len(report.attempts)
        assert report.outcome == "failed"
        assert report.exit_status in (1, 2, 3, 93)
        assert not (tmp_path / str(seed) / "attempt-1000").exists()
        seed += 1
    assert tally.bugs == []
    assert tally.frames > 100


EXITS = b"".join(encode(Exited(f"worker:{index}", TaskExit(0), 1.0)) for index in range(4))


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (EXITS, "Exited for worker:0, which is not one of its tasks"),
        (encode(Log(1, "worker:0", 0, 6), b"forged"), "Log for worker:0, which is not one of its tasks"),
        (encode(Log(7, "worker:2", 0, 6), b"forged"), "Log for attempt 7, which has not begun"),
        (encode(Refused([Problem("no-program", "x", task="worker:9")])), "Refused for worker:9, which is not one of"),
        (encode(Refused([Problem("succeeded", "x")])), "'succeeded' is not a problem reference"),
        (encode(Synced("", 1, 10**400)), "Synced.fetched: a number of 1329 bits is out of range"),
        (
            encode(Log(1, "worker:2", 1 << 43, 1), b"x"),
            "a log piece at offset 8,796,093,022,208 after",
        ),
        (
            b'{"type":"Status","task":"worker:2","status":' + b" " * (15 << 20),
            "a header of more than 262144 bytes (Status)",
        ),
    ],
)
def test_a_forged_message_loses_its_node_and_has_no_other_effect(tmp_path: Path, lie: bytes, said: str) -> None:
    tally = Tally()
    report = run_once(tmp_path / "run", 1, 1, tally, lie=lie)
    verdict = report.attempts[0].verdict
    assert (report.outcome, report.exit_status, tally.bugs) == ("failed", 3, [])
    assert verdict.message.startswith("node hostile was lost: the agent sent ")
    assert said in verdict.message
    assert verdict.message.endswith("[protocol-error]")
    assert [(task.exit_code, task.exit_signal) for task in report.attempts[0].tasks[:2]] == [(None, 15)] * 2
    assert (tmp_path / "run" / "attempt-1" / "worker-0.log").read_bytes() == b"xxxxx"
    assert sorted(path.name for path in (tmp_path / "run").glob("attempt-*")) == ["attempt-1"]


LIMITED = [kind for kind, cost in COSTS.items() if cost.at_once is not None]
FLOODS = (*LIMITED, Inspected, Dialled, LinkMeasured, NodeMeasured, KeptWarm, Prepared, Beat, Stacks, Profiled)


@pytest.mark.parametrize("kind", FLOODS, ids=lambda kind: kind.__name__)
def test_a_flood_of_one_message_grows_neither_memory_nor_files(tmp_path: Path, kind: type[Any]) -> None:
    chance = random.Random(1)
    frames = RandomFrames(chance, [kind], ["worker:2", "worker:3"], 0.0)
    drawn = [frames.draw() for _ in range(100)]
    flood = b"".join(chance.choice(drawn) for _ in range(min(20_000, (20 << 20) * 100 // sum(map(len, drawn)))))
    before = psutil.Process().memory_info().rss
    report = run_once(tmp_path / "run", 1, 1, tally := Tally(), lie=flood + b"enough\n")
    assert tally.bugs == []
    assert report.outcome == "failed"
    assert (tmp_path / "run" / "events.jsonl").stat().st_size < 2 << 20
    assert sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()) < 8 << 20
    assert psutil.Process().memory_info().rss - before < 200 << 20


@linux
def test_random_orders_from_a_controller_never_crash_the_agent(tmp_path: Path) -> None:
    began, seed, taken = time.monotonic(), 0, 0
    while seed < 500 and (time.monotonic() - began < SECONDS / 2 or taken < 100):
        abused = Abused(tmp_path / str(seed), seed, 0.002)
        abused.feed(1000)
        assert abused.end() == ""
        seed, taken = seed + 1, taken + abused.taken
        assert abused.peak_kib < 64 << 10
    assert taken >= 100
