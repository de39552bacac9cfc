"""What the checks before a start find, as parts of their report."""

from __future__ import annotations

from typing import Literal

from launcher.result import Result


class Finding(Result):
    """Something that the checks before a start have found."""

    level: Literal["error", "warning"]
    """An error keeps the cluster from being started."""
    node: str
    """The node that it was found on."""
    reference: str
    """Stable kebab-case name: `cannot-reach`, `program-differs`, …"""
    message: str
    """One sentence."""
    hint: str = ""
    """What to do about it."""


class DialReport(Result):
    """One node dialled one task of the cluster, on the address and port of TF_CONFIG."""

    node: str
    """The node that dialled."""
    task: str
    """Whose address it was."""
    address: str
    """`host:port`."""
    resolved: list[str]
    """What the host's name stands for on the node that dialled."""
    failure: str
    """Empty if the task's own node answered."""
