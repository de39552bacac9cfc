"""Orders and answers of the speed check: what a node computes and copies, and what a link between two nodes carries."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Amount, Line, Matches, Name
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Target

METHODS = ("tensorflow", "torch", "numpy", "python")
"""What a matrix product can be computed by; `python` is there on every node."""


@dataclass(frozen=True)
class MeasureNode:
    """Measure a matrix product and a memory copy, in a process that stays for further orders of this kind.

    `env` is merged over the agent's own environment without `unset`: what a task will have. With `only_starts`, the
    process starts and answers when it could measure.
    """

    method: Annotated[str, Matches("|".join(METHODS), "method")]
    env: dict[str, str]
    unset: list[str]
    only_starts: bool = False


@dataclass(frozen=True)
class NodeMeasured:
    """The answer to MeasureNode: the best of several short windows.

    `method`: the library and the kind of device; only nodes with equal methods can be compared. `problem`: why
    nothing was measured.
    """

    method: Name = ""
    gflop_s: Amount = 0.0
    memory_gb_s: Amount = 0.0
    problem: Line = ""


@dataclass(frozen=True)
class MeasureLink:
    """Measure the connection to the target, at which another agent answers who knows the `nonce`."""

    target: Target
    nonce: Name


@dataclass(frozen=True)
class LinkMeasured:
    """The answer to MeasureLink: MB/s to the target's node and back, and the shortest time for a byte there and back.

    `problem`: why nothing was measured.
    """

    there_mb_s: Amount = 0.0
    back_mb_s: Amount = 0.0
    latency_s: Amount = 0.0
    problem: Line = ""
