"""Messages by which a run waits for free GPUs and reserves them."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Attempt, Items, Line, Name, Within
from worker_entry.protocol.frozen import dataclass, field

GPUS_LIMIT = 1024
HOLDERS_LIMIT = 64
UNKNOWN_RUN = "?"


@dataclass(frozen=True)
class ClaimGpus:
    """Reserve the first `count` free GPUs of these for the run, or none if too few are free. Answered by GpusClaimed.

    `gpus`: as CUDA_VISIBLE_DEVICES names them.
    """

    attempt: Attempt
    gpus: Annotated[list[Name], Items(GPUS_LIMIT)]
    count: Annotated[int, Within(0, GPUS_LIMIT)]


@dataclass(frozen=True)
class ReleaseGpus:
    """Release all GPUs that are reserved for the run."""


@dataclass(frozen=True)
class GpuHolder:
    """A process that uses a GPU or, if `run` is set, reserves it for another run.

    Unknown values are 0 or empty, as for a process in another container.
    """

    pid: Annotated[int, Within(0, 1 << 31)] = 0
    user: Name = ""
    command: Name = ""
    run: Name = ""


@dataclass(frozen=True)
class BusyGpu:
    """A GPU that is not free, and its known users."""

    gpu: Name
    holders: Annotated[list[GpuHolder], Items(HOLDERS_LIMIT)]


@dataclass(frozen=True)
class GpusClaimed:
    """The answer to ClaimGpus: the GPUs that are reserved for the run; or none, and those that are not free.

    `problem`: why the node does not know which of its GPUs are free.
    """

    attempt: Attempt
    gpus: Annotated[list[Name], Items(GPUS_LIMIT)]
    busy: Annotated[list[BusyGpu], Items(GPUS_LIMIT)] = field(default_factory=list)
    problem: Line = ""
