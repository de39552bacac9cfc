"""Whole runs from seeds: no order of events breaks a rule; see `tests.sim.storm`."""

from __future__ import annotations

import cProfile
import gc
import os
import secrets
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.report import goodput_count
from launcher.tasks import TaskId
from tests.harness.apart import linux
from tests.harness.places import ROOT
from tests.sim.storm.defects import DEFECTS, put_back
from tests.sim.storm.history_files import list_histories, read, read_defect
from tests.sim.storm.many import make_scenario
from tests.sim.storm.scenarios import Fault, Moment, Program, Scenario, draw, draw_whole
from tests.sim.storm.shrinking import play, shrink
from tests.sim.storm.world import World
from worker_entry.protocol.resend_buffer import ResendBuffer

PARTS, SEEDS, NEW_SEEDS, WHOLE_SEEDS = 20, 50, 25, 10
"""The runs are split into parts, which several processes share."""
GROWTH = 50 << 10
"""Bytes that a run may grow within a thousand reports: less than any object for each of them takes."""


@pytest.mark.parametrize("part", range(PARTS))
def test_no_fixed_seed_breaks_a_rule(part: int) -> None:
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        assert not (broken := play(draw(seed))), f"seed {seed}: {broken[0]}"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_new_seed_breaks_a_rule(part: int) -> None:
    """A failure names its seed: `python -m tests.sim.storm --first SEED --seeds 1` shrinks it."""
    first = part + secrets.randbelow(1 << 40)
    for seed in range(first, first + NEW_SEEDS):
        assert not (broken := play(draw(seed))), f"seed {seed}: {broken[0]}"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_breaks_a_rule_with_real_agents_and_links(part: int) -> None:
    """Half of the seeds are new: `python -m tests.sim.storm --whole --first SEED --seeds 1` shrinks one."""
    first = part + secrets.randbelow(1 << 40)
    fixed = range(part * WHOLE_SEEDS, (part + 1) * WHOLE_SEEDS)
    for seed in (*fixed, *range(first, first + WHOLE_SEEDS)):
        assert not (broken := play(draw_whole(seed))), f"seed {seed}: {broken[0]}"


@pytest.mark.parametrize("history", list_histories(), ids=lambda path: path.stem)
def test_the_order_of_events_of_a_mended_defect_breaks_no_rule(history: Path) -> None:
    assert play(read(history)) == []


@pytest.mark.parametrize(
    "history", [each for each in list_histories() if read_defect(each)], ids=lambda path: path.stem
)
def test_a_history_breaks_a_rule_when_its_defect_is_put_back(history: Path) -> None:
    with put_back(read_defect(history)):
        assert play(read(history))


def test_each_defect_that_storm_finds_has_a_history() -> None:
    assert {read_defect(history) for history in list_histories()} >= DEFECTS.keys()


def test_a_seed_plays_the_same_run_in_every_process() -> None:
    """The order of sets differs between processes, and must not matter."""
    program = (
        "import pathlib, sys, tempfile\n"
        "from tests.sim.storm.scenarios import draw\n"
        "from tests.sim.storm.world import World\n"
        "for seed in range(40):\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        world = World(draw(seed), pathlib.Path(folder, 'run'))\n"
        "        world.play()\n"
        "        print(seed, world.simulation.now, [*map(len, world.written.values())], len(world.excuses))\n"
    )
    played = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert played[0] == played[1]


def test_a_failing_scenario_shrinks_to_the_fault_that_matters() -> None:
    nodes = [{"host": f"n{n}", "address": f"10.0.0.{n + 1}", "tasks": {"worker": 1}} for n in range(3)]
    timeouts = {"lease_s": 60.0, "start_s": 60.0, "drain_s": 30.0, "stop_grace_s": 2.0, "stall_s": 30.0}
    matters = Fault("outage", Moment("up", 1, 5.0), seconds=40.0)
    scenario = Scenario(
        1,
        {
            "nodes": nodes,
            "program": {"script": "train.py"},
            "strategy": "multi_worker_mirrored",
            "restart": {"max_restarts": 0, "return_s": 0, "period_s": 0},
            "timeouts": timeouts,
        },
        Program(trains_s=80.0),
        (Fault("jump", Moment("up"), "n1", 5.0), matters, Fault("signal", Moment("Start"), what="SIGUSR1")),
    )
    with put_back("blind"):
        least = shrink(scenario)
        assert [fault.kind for fault in least.faults] == ["outage"]
        assert len(least.spec["nodes"]) < 3
        assert play(Scenario.from_json(least.to_json()))


@linux
def test_a_played_run_leaves_no_descriptor_open() -> None:
    """All of them share a process: controllers that were killed, agents that were, and machines that went off."""
    play(draw_whole(0))
    gc.collect()  # a run of an earlier test may have been broken off
    before = os.listdir("/proc/self/fd")
    for seed in range(4, 10):
        play(draw_whole(seed))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def _keep_all_points(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(goodput_count, "LIMIT", 1 << 20)


def _keep_confirmed_frames(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ResendBuffer, "confirm", lambda *_: None)


@pytest.mark.parametrize("defect", [None, _keep_all_points, _keep_confirmed_frames])
def test_the_memory_of_a_run_is_bounded(
    defect: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither reports nor beats nor new connections leave anything in the controller, its links or its agents."""
    monkeypatch.setattr(goodput_count, "LIMIT", 32)
    if defect is not None:
        defect(monkeypatch)
    spec = {
        "nodes": [{"host": "n0", "address": "10.0.0.1", "tasks": {"worker": 2}}],
        "program": {"script": "train.py"},
        "strategy": "multi_worker_mirrored",
        "restart": {"max_restarts": 0, "return_s": 0, "period_s": 0},
        "timeouts": {"lease_s": 60.0, "start_s": 60.0, "drain_s": 30.0, "stop_grace_s": 2.0, "stall_s": 300.0},
    }
    drops = tuple(Fault("drop", Moment("up", 1, 40.0 * number), "n0") for number in range(1, 40))
    world = World(Scenario(1, spec, Program(trains_s=1e6, report_s=2.0), drops, is_whole=True), tmp_path / "run")
    world.begin()
    world.let_pass(100.0)
    tracemalloc.start()
    try:
        before = _measure_least(world)
        world.let_pass(1000.0)
        grown = _measure_least(world) - before
    finally:
        tracemalloc.stop()
        world.controllers[-1].kill()
        world.let_pass(300.0)  # its agents end
    assert not world.broken
    assert (grown > GROWTH) == (defect is not None), grown


def _measure_least(world: World) -> int:
    """The bytes that distlaunch has allocated, at the moment within two minutes when they are fewest."""
    ours = [tracemalloc.Filter(True, f"{ROOT}/{package}/*") for package in ("launcher", "worker_entry")]
    sizes = []
    for _ in range(10):
        world.let_pass(12.0)
        gc.collect()
        sys._clear_type_cache()  # it keeps copies of names, as many as it has room for
        sizes.append(sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces))
    return min(sizes)


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
def test_the_work_of_a_controller_grows_no_faster_than_its_nodes(
    framework: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the start over a failure and a restart to the end; copies of the state do not count."""
    monkeypatch.setattr(TaskId, "__hash__", _hash_task)  # counts, too, what happens inside of sets
    few, many = (_count_calls(nodes, framework, tmp_path / str(nodes)) / nodes for nodes in (50, 200))
    assert many < 1.1 * few, (few, many)


def _hash_task(task: TaskId) -> int:
    return tuple.__hash__(task)


def _count_calls(nodes: int, framework: str, folder: Path) -> int:
    """How often functions of the controller are called in a run."""
    folder.mkdir()
    world, profile = World(make_scenario(nodes, dies=True, framework=framework), folder / "run"), cProfile.Profile()
    assert profile.runcall(world.play) == []
    ours = (f"{ROOT}/launcher", __file__)
    return sum(
        entry.callcount
        for entry in profile.getstats()
        if not isinstance(entry.code, str) and entry.code.co_filename.startswith(ours)
    )
