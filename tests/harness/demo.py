"""The built-in training program."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).parents[1] / "worker_entry" / "demo"
