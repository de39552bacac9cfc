"""Takeovers, resumes and fencing in any order: several controllers of one run, with one journal."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.sim.storm.controllers import Controller
from tests.sim.storm.defects import put_back
from tests.sim.storm.scenarios import Fault, Moment, Program, Scenario
from tests.sim.storm.shrinking import MEMORY
from tests.sim.storm.world import World

NODES = ("n0", "n1", "n2")
NOW = Moment()


class Takeovers(RuleBasedStateMachine):
    """A run of three workers and one spare node, whose controllers die, hang and come again at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.world: World

    @initialize(seed=st.integers(0, 1000), max_restarts=st.integers(0, 2), is_whole=st.booleans())
    def start(self, seed: int, max_restarts: int, is_whole: bool) -> None:
        nodes = [{"host": host, "address": f"10.0.0.{n + 1}", "tasks": {"worker": 1}} for n, host in enumerate(NODES)]
        spec = {
            "nodes": [*nodes, {"host": "s0", "address": "10.0.1.1", "spare": True}],
            "program": {"script": "train.py"},
            "strategy": "multi_worker_mirrored",
            "restart": {"max_restarts": max_restarts, "return_s": 60, "period_s": 0},
            "timeouts": {"lease_s": 60.0, "start_s": 120.0, "drain_s": 60.0, "stop_grace_s": 2.0},
        }
        # The faults only bound what the run may need: each rule here makes one of them.
        faults = (Fault("suspend", Moment("never"), seconds=90.0),) * 30
        scenario = Scenario(seed, spec, Program(trains_s=60.0), faults, is_whole=is_whole)
        self.world = World(scenario, self.folder / "run")
        self.world.begin()

    @property
    def controller(self) -> Controller | None:
        return self.world.controller

    @property
    def has_controller(self) -> bool:
        return self.controller is not None

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, 5.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.let_pass(seconds)

    @precondition(lambda self: self.has_controller)
    @rule(effects=st.integers(0, 12))
    def the_controller_dies(self, effects: int) -> None:
        assert self.controller is not None
        self.controller.kill_soon(effects)
        self.world.let_pass(6.0)

    @rule(times=st.integers(1, 2))
    def the_user_resumes(self, times: int) -> None:
        self.world.resume(times=times)
        self.world.let_pass(0.5)

    @precondition(lambda self: self.has_controller)
    @rule()
    def the_user_resumes_a_run_that_has_a_controller(self) -> None:
        assert self.controller is not None
        Controller(self.world, self.controller.generation + 1)
        self.world.let_pass(0.5)

    @precondition(lambda self: self.has_controller)
    @rule(seconds=st.sampled_from([1.0, 20.0, 90.0]))
    def the_controller_is_suspended(self, seconds: float) -> None:
        self.world.do(Fault("suspend", NOW, seconds=seconds))

    @rule(host=st.sampled_from(NODES), seconds=st.sampled_from([1.0, 20.0, 90.0]))
    def a_connection_breaks(self, host: str, seconds: float) -> None:
        self.world.do(Fault("drop", NOW, host, seconds))

    @rule(number=st.integers(0, 2))
    def a_task_fails(self, number: int) -> None:
        self.world.do(Fault("exit", NOW, f"worker:{number}", what="1 ValueError: no batch"))

    @precondition(lambda self: self.has_controller)
    @rule()
    def the_user_interrupts(self) -> None:
        self.world.do(Fault("signal", NOW, what=signal.SIGINT.name))

    @invariant()
    def every_rule_holds(self) -> None:
        if hasattr(self, "world"):
            assert not self.world.broken, self.world.broken[0]

    def teardown(self) -> None:
        if hasattr(self, "world"):
            broken = self._finish()
            shutil.rmtree(self.folder, ignore_errors=True)
            assert not broken, broken[0]

    def _finish(self) -> list[object]:
        while not self.world.is_over and not self.world.broken and self.world.simulation.now < 20_000:
            self.world.let_pass(120.0)
            self.world.resume()
        return [*self.world.finish()]


TestTakeovers = Takeovers.TestCase
TestTakeovers.settings = settings(max_examples=100, stateful_step_count=12)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_controller_that_leaves_tasks_behind_is_found(is_whole: bool) -> None:
    takeovers = Takeovers()
    takeovers.start(seed=1, max_restarts=1, is_whole=is_whole)
    takeovers.time_passes(5.0)  # the tasks start
    takeovers.the_controller_dies(0)
    with put_back("leftovers"):
        takeovers.the_user_resumes(1)
        takeovers.time_passes(30.0)
    with pytest.raises(AssertionError, match="while worker:0 of attempt 1 runs"):
        takeovers.teardown()
