"""Results of the checks before a start, as parts of their report."""

from __future__ import annotations

from typing import Literal

from launcher.result import Result

SEND_FOLDER = "copy it there, or send this folder with `sync: {to: ~/project}` (--set sync.to='~/project')"
"""The hint for a program that is not on a node."""


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


class NodeSpeed(Result):
    """The speed at which a node computes and copies, as measured by the speed check."""

    node: str
    """The `host` of the spec."""
    method: str
    """The library and the kind of device; only nodes with equal methods are compared."""
    gflop_s: float
    """10^9 floating point operations a second, in products of matrices."""
    memory_gb_s: float
    """GB/s copied in the node's memory by one thread."""


class LinkSpeed(Result):
    """The speed of the link between two nodes, over one TCP connection to the address and a port of a task."""

    node: str
    """The node that dialled."""
    to: str
    """The node that it dialled."""
    there_mb_s: float
    """MB/s from the first to the second."""
    back_mb_s: float
    """MB/s from the second to the first."""
    latency_s: float
    """The shortest time that a byte took there and back."""


class SpeedReport(Result):
    """The result of the speed check: the best of all rounds for each figure."""

    nodes: list[NodeSpeed]
    """The nodes that could be measured, in the order of the spec."""
    links: list[LinkSpeed]
    """The links that could be measured."""
    findings: list[Finding]
    """What is slow, and what could not be measured."""
    seconds: float
    """How long the speed check took."""
