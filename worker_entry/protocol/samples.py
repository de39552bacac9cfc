"""Samples of the resources that tasks and nodes use.

Seconds and bytes are counted since the task, or the machine, started: a lost sample does not change the sums, and any
two samples give the average between them.
"""

from __future__ import annotations

from typing import Annotated, Optional

from worker_entry.protocol.field_limits import Amount, Count, Items, Name, OwnTask
from worker_entry.protocol.frozen import dataclass, field


@dataclass(frozen=True)
class TaskSample:
    """The resources that all processes of a task have used.

    `cpu_s`: seconds on a core. `starved_s`: seconds in which a thread was ready to run but had no core; None if the
    kernel does not count them. `memory`: resident bytes; memory that several processes share counts several times, as
    in `top`. `swapped`: bytes in swap. `read`, `written`: bytes that went through files, pipes and sockets.
    """

    task: OwnTask
    cpu_s: Amount
    memory: Count
    starved_s: Optional[Amount] = None
    swapped: Count = 0
    threads: Count = 0
    read: Count = 0
    written: Count = 0


@dataclass(frozen=True)
class GpuSample:
    """One GPU: `use` is the share of the time in which the GPU worked; `memory` and `memory_total` are bytes."""

    gpu: Name
    use: Optional[Amount] = None
    memory: Count = 0
    memory_total: Count = 0
    power_w: Optional[Amount] = None
    celsius: Optional[Amount] = None


@dataclass(frozen=True)
class NodeSample:
    """The resource use of the whole machine, all users together; in a container, as its limits and namespaces show it.

    `cpu_s`: seconds in which a core was busy, summed over all cores. `received`, `sent`: bytes through all network
    interfaces but the loopback.
    """

    cpu_s: Amount
    cores: Count
    memory: Count
    memory_total: Count
    received: Count = 0
    sent: Count = 0
    gpus: Annotated[list[GpuSample], Items(256)] = field(default_factory=list)
