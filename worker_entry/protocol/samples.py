"""What tasks and nodes use, as it is measured from time to time.

Seconds and bytes are counted since the task, or the machine, began: a sample that is lost takes nothing from the sums,
and the average over any time follows from two samples.
"""

from __future__ import annotations

from typing import Annotated, Optional

from worker_entry.protocol.field_limits import Amount, Count, Items, Name, OwnTask
from worker_entry.protocol.frozen import dataclass, field


@dataclass(frozen=True)
class TaskSample:
    """What all processes of a task have used.

    `cpu_s`: seconds on a core. `starved_s`: seconds in which a thread could have run and had no core; None if the
    kernel does not count them. `memory`: resident bytes; what several processes share counts several times, as in
    `top`. `swapped`: bytes in swap. `read`, `written`: bytes that went through files, pipes and sockets.
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
    """One GPU: `use` is the share of the time in which it worked, `memory` and `memory_total` are bytes."""

    gpu: Name
    use: Optional[Amount] = None
    memory: Count = 0
    memory_total: Count = 0
    power_w: Optional[Amount] = None
    celsius: Optional[Amount] = None


@dataclass(frozen=True)
class NodeSample:
    """What the whole machine uses, all of its users together; in a container, what its limits and namespaces show.

    `cpu_s`: seconds in which a core was busy, all cores together. `received`, `sent`: bytes through all network
    interfaces but the loopback.
    """

    cpu_s: Amount
    cores: Count
    memory: Count
    memory_total: Count
    received: Count = 0
    sent: Count = 0
    gpus: Annotated[list[GpuSample], Items(256)] = field(default_factory=list)
