"""Results of the checks before a start, as parts of their report."""

from __future__ import annotations

from typing import Literal

from launcher.result import Result


class Finding(Result):
    """One problem that the checks before a start have found."""

    level: Literal["error", "warning"]
    """An error keeps the cluster from starting."""
    node: str
    """The node that has the problem."""
    reference: str
    """Stable kebab-case name: `cannot-reach`, `program-differs`, …"""
    message: str
    """One sentence."""
    hint: str = ""
    """What to do about it."""


class DialReport(Result):
    """One dial: from a node to a task's address and port in TF_CONFIG."""

    node: str
    """The node that dialled."""
    task: str
    """The task whose address it dialled."""
    address: str
    """`host:port`."""
    resolved: list[str]
    """What the host's name resolves to on the node that dialled."""
    failure: str
    """Why the dial failed; empty if the task's own node answered."""
