"""Reduces a failing scenario to its fewest faults and simplest spec, as long as the same rule breaks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.sim.storm.scenarios import Program, Scenario
from tests.sim.storm.world import Broken, World

MEMORY = Path("/dev/shm")


def play(scenario: Scenario) -> list[Broken]:
    """Plays the scenario in a folder of its own; returns the rules that did not hold."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        return World(scenario, Path(folder, "run")).play()


def shrink(scenario: Scenario, tell: Callable[[str], None] = lambda _: None) -> Scenario:
    """The simplest scenario found that breaks the same rule; the scenario itself if it breaks none."""
    broken = play(scenario)
    if not broken:
        return scenario
    rule, current, is_smaller = broken[0].rule, scenario, True
    while is_smaller:
        is_smaller = False
        for simpler in _simplify(current):
            if any(found.rule == rule for found in play(simpler)):
                current, is_smaller = simpler, True
                tell(f"{len(current.faults)} faults, {len(current.spec['nodes'])} nodes")
                break
    return current


def _simplify(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less, the boldest first."""
    faults = scenario.faults
    half = len(faults) // 2
    if half > 1:
        yield scenario.without(faults[:half])
        yield scenario.without(faults[half:])
    for fault in faults:
        yield scenario.without([fault])
    nodes = scenario.spec["nodes"]
    for number in range(len(nodes) - 1, 0, -1):
        yield _with(scenario, {"nodes": [*nodes[:number], *nodes[number + 1 :]]})
    for name in ("tensorboard", "log_directory"):
        if name in scenario.spec:
            rest = {key: value for key, value in scenario.spec.items() if key not in ("tensorboard", "log_directory")}
            yield replace(scenario, spec=rest)
    for node in nodes:
        if "evaluator" in node.get("tasks", {}):
            tasks = {kind: count for kind, count in node["tasks"].items() if kind != "evaluator"}
            yield _with(scenario, {"nodes": [{**each, "tasks": tasks} if each is node else each for each in nodes]})
    if scenario.checks:
        yield replace(scenario, checks=False)
    if scenario.spec.get("preload"):
        yield _with(scenario, {"preload": False})
    usual = Program()
    for name, value in vars(usual).items():
        if getattr(scenario.program, name) != value:
            yield replace(scenario, program=replace(scenario.program, **{name: value}))
    for number, fault in enumerate(faults):
        if fault.when.delay_s:
            for delay_s in (0.0, float(round(fault.when.delay_s))):
                if delay_s != fault.when.delay_s:
                    sooner = replace(fault, when=replace(fault.when, delay_s=delay_s))
                    yield replace(scenario, faults=(*faults[:number], sooner, *faults[number + 1 :]))


def _with(scenario: Scenario, fields: Mapping[str, Any]) -> Scenario:
    return replace(scenario, spec={**scenario.spec, **fields})
