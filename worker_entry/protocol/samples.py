"""What tasks and nodes use, as it is measured from time to time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Optional

from worker_entry.protocol.field_limits import OwnTask, Within


@dataclass(frozen=True)
class TaskSample:
    """What all processes of a task use: `cpu` in cores since the last sample, None at the first; `memory` in bytes.

    Memory that several of them share counts several times, as in `top`.
    """

    task: OwnTask
    cpu: Optional[float]
    memory: Annotated[int, Within(0, 1 << 62)]
