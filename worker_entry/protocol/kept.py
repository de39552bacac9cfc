"""What an agent says of staying for the next run."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Amount, Count, Items, Line, Pid
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
