"""The state of a running run as points of curves that TensorBoard shows next to the loss.

Each task has a folder, so that its curves have its name and colour; curves of the whole run are in the parent folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from launcher.report.status_report import RunStatus, TaskState
from launcher.tasks import parse_task_id
from worker_entry.protocol.scalars import ScalarPoint

FOLDER = "distlaunch"


def make_points(status: RunStatus, sent: Mapping[str, int]) -> Iterator[ScalarPoint]:
    """Yields the current points.

    Args:
        status: the run now.
        sent: the step of the last point of each task; a task that has done no step since then gets no new point.
    """
    for task in status.tasks:
        values = _values_of(task)
        if task.step is not None and task.step != sent.get(task.task) and values:
            yield ScalarPoint(f"{FOLDER}/{parse_task_id(task.task).file_name}", task.step, status.now, values)
    if status.goodput is not None:
        seconds = {f"goodput/{kind}_seconds": value for kind, value in status.goodput.by_kind().items()}
        step = max((task.step for task in status.tasks if task.step is not None), default=0)
        yield ScalarPoint(FOLDER, step, status.now, {"goodput/share": status.goodput.share, **seconds})


def _values_of(task: TaskState) -> dict[str, float]:
    values = {
        "distlaunch/step_seconds": task.step_s,
        "distlaunch/own_seconds": task.own_s,
        "distlaunch/waiting_seconds": task.waiting_s,
        "distlaunch/data_seconds": task.data_s,
    }
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
