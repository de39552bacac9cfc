"""The parts of a worker's step: its own work, waiting for input, waiting for other workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from launcher.pages.page_data import PageData
from worker_entry.protocol.frozen import dataclass


@dataclass(frozen=True)
class WorkerSteps:
    """A worker's typical step: medians over all attempts, in seconds; None: not known."""

    task: str
    step_s: float
    own_s: float | None
    data_s: float | None
    score: float | None
    """The median own time of all workers, divided by this worker's: below 1, this worker is slower than most."""

    @property
    def work_s(self) -> float | None:
        """The own time without waiting for input."""
        return None if self.own_s is None else max(self.own_s - (self.data_s or 0.0), 0.0)

    @property
    def waiting_s(self) -> float | None:
        """The time that the worker waits for other workers."""
        return None if self.own_s is None else max(self.step_s - self.own_s, 0.0)


def find_steps(data: PageData) -> list[WorkerSteps]:
    """All tasks whose step times were measured."""
    found = []
    for task in data.task_names:
        samples = [sample for each in data.tasks if each.task == task for sample in each.progress]
        step_s = _median(sample.step_s for sample in samples)
        if step_s is not None:
            own_s = _median(sample.own_s for sample in samples)
            found.append((task, step_s, own_s, _median(sample.data_s for sample in samples)))
    middle = _median(own_s for _, _, own_s, _ in found)
    return [
        WorkerSteps(task, step_s, own_s, data_s, middle / own_s if middle and own_s else None)
        for task, step_s, own_s, data_s in found
    ]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None
