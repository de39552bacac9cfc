"""Points of the curves that TensorBoard shows."""

from __future__ import annotations

from typing import Annotated

from worker_entry.protocol.field_limits import Items, Matches, Name, Number
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class ScalarPoint:
    """The values of one moment, by tag; `folder`: the folder of their event file, below the log directory.

    `time` is in Unix seconds, by the controller's clock.
    """

    folder: Annotated[str, Matches(r"[a-z]+(?:/[a-z]+-[0-9]+)?", "folder of event files")]
    step: Number
    time: float
    values: Annotated[dict[Name, float], Items(64)]
