"""The order to profile a cluster's tasks, and its answer."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Amount, Items, Line, Name, Path
from worker_entry.protocol.frozen import dataclass, field


@dataclass(frozen=True)
class ProfileTarget:
    """A task's profiler server, at the task's address in TF_CONFIG, and whether to record TensorFlow's operations.

    `name`: the task's name in file names.
    """

    name: Name
    address: Name
    operations: bool


@dataclass(frozen=True)
class Profile:
    """Profile these tasks, on this node and others; each task writes to `directory` on its own node."""

    targets: Annotated[list[ProfileTarget], Items(10_000)]
    directory: Annotated[str, Path()]
    duration_s: Amount


@dataclass(frozen=True)
class Profiled:
    """The answer to Profile: the folder of the profile's files.

    `silent`: the tasks that recorded nothing. `failed`: why other tasks could not be asked. `problem`: why no task was
    asked.
    """

    directory: Line = ""
    silent: Annotated[list[Name], Items(10_000)] = field(default_factory=list)
    failed: Annotated[dict[Name, Line], Items(10_000)] = field(default_factory=dict)
    problem: Line = ""
