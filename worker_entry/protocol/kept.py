"""What an agent says of all that stays for the next run: its processes, and what was compiled."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Amount, Attempt, Count, Items, Line, Pid
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Kept:
    """The last message of an agent that was asked to stay for the next run.

    `pids` stay for `seconds`, with so many bytes of their own; none stays if there is a `problem`.
    """

    seconds: Amount
    pids: Annotated[list[Pid], Items(16)]
    bytes: Count
    problem: Line = ""


@dataclass(frozen=True)
class CacheUsed:
    """How many entries of the compile cache the tasks of a node have loaded in an attempt, and how many added."""

    attempt: Attempt
    loaded: Count
    stored: Count
