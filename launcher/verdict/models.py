"""The verdict, a part of the report."""

from __future__ import annotations

from typing import Literal

from launcher.result import Result

OutcomeName = Literal["succeeded", "failed", "interrupted"]


class Verdict(Result):
    """Why the run ended."""

    reference: str
    """Stable kebab-case name: `succeeded`, `task-failed`, `start-timeout`, …"""
    message: str
    """One sentence."""
    task: str | None = None
    """The task that caused the end, if one did."""
    evidence: list[str] = []
    """Lines that support the message."""
    hint: str = ""
    """What to do; empty if no advice always helps."""
