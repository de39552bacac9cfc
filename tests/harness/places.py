"""Folders of the project."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
EXAMPLES = sorted((ROOT / "cluster_specs").glob("*.yaml"))
