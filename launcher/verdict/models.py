"""A verdict, as a part of the report."""

from __future__ import annotations

from typing import Literal

from launcher.result import Result

OutcomeName = Literal["succeeded", "failed", "interrupted"]


class Verdict(Result):
    """Why the run ended as it did."""

    reference: str
    """Stable kebab-case name: `succeeded`, `task-failed`, `start-timeout`, …"""
    message: str
    """One sentence."""
    task: str | None = None
    """The task that is the cause, if one is."""
    evidence: list[str] = []
    """Lines that show it."""
    hint: str = ""
    """What to do about it; empty if there is nothing that always helps."""
