"""An agent's messages about things that stay for the next run: its processes, and compiled code."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Amount, Attempt, Count, Items, Line, Pid
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Kept:
    """The last message of an agent that was asked to stay for the next run.

    The processes `pids` stay for `seconds` and hold `bytes` of memory that is not shared; with a `problem`, none stays.
    """

    seconds: Amount
    pids: Annotated[list[Pid], Items(16)]
    bytes: Count
    problem: Line = ""


@dataclass(frozen=True)
class CacheUsed:
    """The numbers of compile cache entries that the tasks of a node have loaded and added in an attempt."""

    attempt: Attempt
    loaded: Count
    stored: Count
