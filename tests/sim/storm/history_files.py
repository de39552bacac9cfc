"""Histories: scenarios that have broken a rule, in `histories/`, each with the rule and the defect that it showed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sim.storm.scenarios import Scenario
from tests.sim.storm.world import Broken

HISTORIES = Path(__file__).with_name("histories")


def write(scenario: Scenario, broken: Broken) -> Path:
    """Writes a scenario as a history; its `defect` is still to be written by hand."""
    path = HISTORIES / f"{broken.rule.replace(' ', '-')}-{scenario.seed}.json"
    path.write_text(scenario.to_json(broke=broken.rule, defect=broken.detail), encoding="utf-8")
    return path


def read(path: Path) -> Scenario:
    return Scenario.from_json(path.read_text(encoding="utf-8"))


def list_histories() -> list[Path]:
    return sorted(HISTORIES.glob("*.json"))


def describe(path: Path) -> str:
    """The defect that the history has shown."""
    return str(json.loads(path.read_text(encoding="utf-8"))["defect"])
