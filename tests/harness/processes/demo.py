"""The built-in training program."""

from __future__ import annotations

from tests.harness.places import ROOT

DEMO = ROOT / "worker_entry" / "demo"
