"""Orders and answers of the speed check: the speed of a node's computation and memory, and of a link between nodes."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Amount, Line, Matches, Name
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.values import Target

METHODS = ("tensorflow", "torch", "numpy", "python")
"""Methods of computing a matrix product; `python` exists on every node."""


@dataclass(frozen=True)
class MeasureNode:
    """Measure a matrix product and a memory copy, in a process that stays for further orders of this kind.

    `env` is merged over the agent's environment without `unset`, as for a task. With `only_starts`, the process only
    starts, and answers when it is ready to measure.
    """

    method: Annotated[str, Matches("|".join(METHODS), "method")]
    env: dict[str, str]
    unset: list[str]
    only_starts: bool = False


@dataclass(frozen=True)
class NodeMeasured:
    """The answer to MeasureNode: the best of several short windows.

    `method`: the library and the kind of device; only nodes with the same method can be compared. `problem`: why
    nothing was measured.
    """

    method: Name = ""
    gflop_s: Amount = 0.0
    memory_gb_s: Amount = 0.0
    problem: Line = ""


@dataclass(frozen=True)
class MeasureLink:
    """Measure the connection to the target, where another agent answers that knows the `nonce`."""

    target: Target
    nonce: Name


@dataclass(frozen=True)
class LinkMeasured:
    """The answer to MeasureLink: MB/s to and from the target's node, and the shortest round-trip time of a byte.

    `problem`: why nothing was measured.
    """

    there_mb_s: Amount = 0.0
    back_mb_s: Amount = 0.0
    latency_s: Amount = 0.0
    problem: Line = ""
