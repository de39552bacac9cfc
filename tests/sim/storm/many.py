"""One run with many nodes: the processor time of its controller, and of the simulation around it."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.sim.storm.links import StormLink
from tests.sim.storm.scenarios import Fault, Moment, Program, Scenario
from tests.sim.storm.shrinking import MEMORY
from tests.sim.storm.simulation import Thread
from tests.sim.storm.world import HORIZON_S, World


def make_scenario(nodes: int, *, dies: bool, framework: str = "torch") -> Scenario:
    """A healthy run with a task on each node; `dies`: one task fails while it trains, and the cluster restarts.

    By default, with PyTorch: TF_CONFIG has no room for the addresses of more than 6,000 tasks.
    """
    spec = {
        "nodes": [
            {"host": f"n{number}", "address": f"10.{number >> 8}.{number & 255}.1", "tasks": {"worker": 1}}
            for number in range(nodes)
        ],
        "program": {"script": "train.py"},
        "preload": False,
        "restart": {"max_restarts": 1, "return_s": 0, "period_s": 0},
        "timeouts": {"lease_s": 60.0, "start_s": 120.0, "drain_s": 60.0, "stop_grace_s": 10.0},
    }
    spec |= {"framework": framework} if framework != "tensorflow" else {"strategy": "multi_worker_mirrored"}
    death = Fault("exit", Moment("up", 1, 5.0), f"worker:{nodes // 2}", what="1 ValueError: no batch")
    return Scenario(1, spec, Program(trains_s=20.0), (death,) if dies else ())


def measure(nodes: int, *, dies: bool) -> str:
    """Plays the run; returns a line with processor times in seconds.

    Raises:
        AssertionError: a rule does not hold.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder, _timing_controller() as used:
        world = World(make_scenario(nodes, dies=dies), Path(folder, "run"))
        began = time.process_time()
        world.begin()
        world.simulation.run(lambda: 1 in world.clusters and world.clusters[1].is_up, HORIZON_S)
        start_s = used()
        broken = world.finish()
        controller_s, all_s = used(), time.process_time() - began
    assert not broken, broken[0]
    report = world.controllers[-1].report
    assert report is not None
    assert (report.outcome, len(report.attempts)) == ("succeeded", 1 + dies)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{nodes:>6,} nodes, {len(report.attempts)} attempts: controller {controller_s:6.1f} s, of which start "
        f"{start_s:6.1f} s; simulation {all_s - controller_s:6.1f} s; {memory:5.0f} MiB"
    )


@contextmanager
def _timing_controller() -> Iterator[Callable[[], float]]:
    """Yields a function that returns the processor time of the controller so far: of its threads and links."""
    used = 0.0

    def time_calls(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            nonlocal used
            began = time.process_time()
            try:
                return function(*args)
            finally:
                used += time.process_time() - began

        return timed

    with (
        patch.object(Thread, "resume", time_calls(Thread.resume)),
        patch.object(StormLink, "take", time_calls(StormLink.take)),
    ):
        yield lambda: used
