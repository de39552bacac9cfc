"""Histories: scenarios that have broken a rule, in `histories/`, each with what was wrong."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sim.storm.scenarios import Scenario
from tests.sim.storm.world import Broken

HISTORIES = Path(__file__).with_name("histories")


def write(scenario: Scenario, broken: Broken) -> Path:
    """Writes a scenario as a history; `showed`, what was wrong, is to be written by hand once it is known."""
    path = HISTORIES / f"{broken.rule.replace(' ', '-')}-{scenario.seed}.json"
    path.write_text(scenario.to_json(showed=str(broken), defect=""), encoding="utf-8")
    return path


def read(path: Path) -> Scenario:
    return Scenario.from_json(path.read_text(encoding="utf-8"))


def list_histories() -> list[Path]:
    return sorted(HISTORIES.glob("*.json"))


def read_defect(path: Path) -> str:
    """The name in `DEFECTS` of what was wrong; empty if it cannot be put back."""
    return str(json.loads(path.read_text(encoding="utf-8"))["defect"])
