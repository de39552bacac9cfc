"""Runs that are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.report.goodput import KINDS


def run_json(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return facts


def read_goodput(folder: Path) -> dict[str, float]:
    """The seconds of the run by kind; checks that each second of all its controllers is counted once."""
    report = json.loads((folder / "report.json").read_text())
    goodput: dict[str, float] = report["goodput"]
    assert sum(goodput[kind] for kind in KINDS) == pytest.approx(report["ended"] - report["started"], abs=1e-5)
    return goodput
