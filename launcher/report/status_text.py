"""A run's status as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.report.status_report import GpuState, NodeState, RunStatus, TaskState
from launcher.report.table import EMPTY, Column
from launcher.wording import count_of, render_age, render_ago, render_step_time
from worker_entry.protocol.units import render_size

COLUMNS = (
    Column("TASK", 120),
    Column("NODE", 70, least=8),
    Column("STATE", 110, least=9),
    Column("ADDRESS", 20),
    Column("EPOCH", 40),
    Column("STEP", 100),
    Column("STEPS/S", 95),
    Column("LOSS", 90),
    Column("CPU", 80),
    Column("MEMORY", 75),
    Column("GPU", 60),
    Column("OWN TIME", 50),
)
NODE_COLUMNS = (
    Column("NODE", 100, least=8),
    Column("CPU", 90),
    Column("MEMORY", 80),
    Column("NETWORK", 10),
    Column("GPU", 70, least=8),
)


def render_header(status: RunStatus) -> str:
    """`two-nodes-b2bf: running, attempt 2 (1 restart), 3 min 20 s, about 12 min left`, `…, ended 5 min ago`."""
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    restarts = f" ({count_of(status.restarts, 'restart')})" if status.restarts else ""
    left = "" if status.eta_s is None else f", about {render_age(status.eta_s)} left"
    waits_for = f" ({status.waits_for})" if status.waits_for else ""
    state = f"{status.state}{waits_for}{attempt}{restarts}"
    if status.ended is None:
        return f"{status.run_id}: {state}, {render_age(status.now - status.started)}{left}"
    seen = "last seen" if status.state == "lost" else "ended"
    lasted = f"{render_age(status.ended - status.started)}, {seen} {render_ago(status.ended, status.now)}"
    return f"{status.run_id}: {state}, {lasted}"


def make_rows(status: RunStatus) -> list[list[str]]:
    """A row of COLUMNS for each task, including columns in which no task has a value."""
    gpus = {(node.node, gpu.gpu): gpu for node in status.nodes for gpu in node.gpus}
    return [
        _make_row(task, [gpus[task.node, name] for name in task.gpus if (task.node, name) in gpus])
        for task in status.tasks
    ]


def make_node_rows(status: RunStatus) -> list[list[str]]:
    """Rows of NODE_COLUMNS for the nodes that were measured; each GPU after a node's first has a separate row."""
    return [row for node in status.nodes for row in _make_node_rows(node, status.tasks)]


def _make_row(task: TaskState, gpus: Sequence[GpuState]) -> list[str]:
    step_s, own_s = task.step_s, task.own_s
    return [
        task.task,
        task.node,
        task.state,
        task.address or EMPTY,
        EMPTY if task.epoch is None else str(task.epoch),
        EMPTY if task.step is None else f"{task.step:,}",
        EMPTY if not step_s else f"{1 / step_s:.3g}",
        render_number(task.metrics.get("loss")),
        EMPTY if task.cpu is None else f"{task.cpu:.0%}",
        EMPTY if task.memory is None else render_size(task.memory),
        " ".join((",".join(task.gpus) or EMPTY, *_render_gpus(gpus))),
        EMPTY if own_s is None else render_step_time(own_s),
    ]


def _make_node_rows(node: NodeState, tasks: Iterable[TaskState]) -> list[list[str]]:
    run = sum(task.memory or 0 for task in tasks if task.node == node.node)
    share = f", run {run / node.memory_total:.0%}" if node.memory_total else ""
    moved = [(node.received_s, "in"), (node.sent_s, "out")]
    first, *others = [_render_gpu(gpu) for gpu in node.gpus] or [EMPTY]
    row = [
        node.node,
        EMPTY if node.cpu is None else f"{node.cpu:.1f} of {node.cores}",
        f"{render_size(node.memory)} of {render_size(node.memory_total)}{share}",
        ", ".join(f"{render_size(rate)}/s {way}" for rate, way in moved if rate is not None) or EMPTY,
        first,
    ]
    return [row, *(["", "", "", "", other] for other in others)]


def _render_gpu(gpu: GpuState) -> str:
    """`0: 87% 12 GiB of 80 GiB 251 W 64 °C`."""
    of_all = [f"{render_size(gpu.memory)} of {render_size(gpu.memory_total)}"] if gpu.memory_total else []
    power = [f"{gpu.power_w:.0f} W"] if gpu.power_w is not None else []
    celsius = [f"{gpu.celsius:.0f} °C"] if gpu.celsius is not None else []
    use = [f"{gpu.use:.0%}"] if gpu.use is not None else []
    return " ".join([f"{gpu.gpu}:", *use, *of_all, *power, *celsius])


def _render_gpus(gpus: Sequence[GpuState]) -> list[str]:
    """`87%`, the average use, and `24 GiB`, all memory in use; unknown values are omitted."""
    uses = [gpu.use for gpu in gpus if gpu.use is not None]
    use = [f"{sum(uses) / len(uses):.0%}"] if uses else []
    memory = [render_size(sum(gpu.memory for gpu in gpus))] if any(gpu.memory_total for gpu in gpus) else []
    return use + memory


def render_number(value: float | None, empty: str = EMPTY) -> str:
    """`0.02314`."""
    return empty if value is None else f"{value:.4g}"
