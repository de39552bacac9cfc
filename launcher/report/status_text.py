"""A run's status as text."""

from __future__ import annotations

from launcher.report.status_report import RunStatus, TaskState
from launcher.wording import count_of, render_age

COLUMNS = ("TASK", "NODE", "STATE", "ADDRESS", "EPOCH", "STEP", "STEPS/S", "LOSS", "CPU", "MEMORY", "GPU", "OWN TIME")
EMPTY = "-"


def render_header(status: RunStatus) -> str:
    """`20261122-… two-nodes: running, attempt 2 (1 restart), 3 min 20 s`."""
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    restarts = f" ({count_of(status.restarts, 'restart')})" if status.restarts else ""
    return f"{status.run_id}: {status.state}{attempt}{restarts}, {render_age(status.now - status.started)}"


def make_rows(status: RunStatus) -> list[list[str]]:
    """A row for each task, as wide as COLUMNS; columns in which no task has anything are kept."""
    return [_make_row(task) for task in status.tasks]


def _make_row(task: TaskState) -> list[str]:
    step_s, own_s = task.step_s, task.own_s
    return [
        task.task,
        task.node,
        task.state.removeprefix("is "),
        task.address or EMPTY,
        EMPTY if task.epoch is None else str(task.epoch),
        EMPTY if task.step is None else f"{task.step:,}",
        EMPTY if not step_s else f"{1 / step_s:.3g}",
        render_number(task.metrics.get("loss")),
        EMPTY if task.cpu is None else f"{task.cpu:.0%}",
        EMPTY if task.memory is None else render_size(task.memory),
        ",".join(task.gpus) or EMPTY,
        EMPTY if own_s is None else render_seconds(own_s),
    ]


def render_number(value: float | None, empty: str = EMPTY) -> str:
    """`0.02314`."""
    return empty if value is None else f"{value:.4g}"


def render_seconds(seconds: float) -> str:
    """`23.1 ms`, `1.2 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def render_size(size: float) -> str:
    """`1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"
