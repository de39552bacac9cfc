"""An agent's messages about connections that do not come from the cluster."""

from __future__ import annotations

from worker_entry.protocol.field_limits import Count, Line, Name, OwnTask
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class Repelled:
    """The task's port has refused connections from an address outside the cluster; sent once for each address."""

    task: OwnTask
    address: Name
    count: Count


@dataclass(frozen=True)
class Unguarded:
    """Others can reach the task's port after all, for the reason `why`."""

    task: OwnTask
    why: Line
