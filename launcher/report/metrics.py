"""The state of a running run as metrics for Prometheus. `launcher/README.md` lists their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector, CollectorRegistry

from launcher.report.state_names import StateName
from launcher.report.status_report import GpuState, NodeState, RunStatus, TaskState

_TASK = ["run", "task", "node"]
_NODE = ["run", "node"]
_GPU = ["run", "node", "gpu"]

Number = float | None
"""A value; None if it is unknown, so that the metric has no sample."""

_OF_TASK: Mapping[str, tuple[str, Callable[[TaskState], Number]]] = {
    "step": ("The last step done.", lambda task: task.step),
    "epoch": ("The epoch of the last step.", lambda task: task.epoch),
    "final_step": ("The step at which training ends.", lambda task: task.total_steps),
    "final_epoch": ("The epoch at which training ends.", lambda task: task.total_epochs),
    "step_seconds": ("Seconds that a recent step took.", lambda task: task.step_s),
    "step_own_seconds": ("Seconds of a recent step without waiting for other tasks.", lambda task: task.own_s),
    "step_waiting_seconds": ("Seconds of a recent step that waited for other tasks.", lambda task: task.waiting_s),
    "step_data_seconds": ("Seconds of a recent step that waited for input.", lambda task: task.data_s),
    "cpu_cores": ("Cores that the task uses.", lambda task: task.cpu),
    "starved_threads": ("Runnable threads without a core.", lambda task: task.starved),
    "threads": ("Threads of the task.", lambda task: task.threads),
    "memory_bytes": ("Resident memory of all processes of the task.", lambda task: task.memory),
    "swapped_bytes": ("Memory of the task in swap.", lambda task: task.swapped),
    "read_bytes_per_second": ("Read from files, pipes and sockets.", lambda task: task.read_s),
    "written_bytes_per_second": ("Written to files, pipes and sockets.", lambda task: task.written_s),
}

_OF_NODE: Mapping[str, tuple[str, Callable[[NodeState], Number]]] = {
    "cores": ("Cores of the machine.", lambda node: node.cores),
    "cpu_cores": ("Busy cores, for all users.", lambda node: node.cpu),
    "memory_used_bytes": ("Memory in use.", lambda node: node.memory),
    "memory_size_bytes": ("Memory of the machine.", lambda node: node.memory_total),
    "received_bytes_per_second": ("Received from the network, without the loopback.", lambda node: node.received_s),
    "sent_bytes_per_second": ("Sent to the network, without the loopback.", lambda node: node.sent_s),
}

_OF_GPU: Mapping[str, tuple[str, Callable[[GpuState], Number]]] = {
    "use_ratio": ("The share of time in which the GPU works.", lambda gpu: gpu.use),
    "memory_used_bytes": ("Memory in use on the GPU.", lambda gpu: gpu.memory),
    "memory_size_bytes": ("Memory of the GPU.", lambda gpu: gpu.memory_total),
    "power_watts": ("The power that the GPU draws.", lambda gpu: gpu.power_w),
    "temperature_celsius": ("The temperature of the GPU.", lambda gpu: gpu.celsius),
}


class RunCollector(Collector):
    """Makes the metrics from the run's status at each scrape."""

    def __init__(self, make_status: Callable[[], RunStatus]) -> None:
        self._make_status = make_status

    def collect(self) -> Iterable[Metric]:
        return make_families(self._make_status())

    def describe(self) -> Iterable[Metric]:
        """Describes nothing: the metrics depend on the run."""
        return ()


def make_registry(make_status: Callable[[], RunStatus]) -> CollectorRegistry:
    """A registry with the metrics of the run, without those of this process."""
    registry = CollectorRegistry()
    registry.register(RunCollector(make_status))
    return registry


def make_families(status: RunStatus) -> Iterator[Metric]:
    """Yields all metrics of the run, without unknown values."""
    yield from _families_of_run(status)
    yield from _families_of_tasks(status)
    nodes = [((status.run_id, node.node), node) for node in status.nodes]
    for name, (meaning, find) in _OF_NODE.items():
        yield from _gauge(f"distlaunch_node_{name}", meaning, _NODE, ((at, find(node)) for at, node in nodes))
    gpus = [((*at, gpu.gpu), gpu) for at, node in nodes for gpu in node.gpus]
    for name, (of_what, find_gpu) in _OF_GPU.items():
        yield from _gauge(f"distlaunch_gpu_{name}", of_what, _GPU, ((at, find_gpu(gpu)) for at, gpu in gpus))


def _families_of_run(status: RunStatus) -> Iterator[Metric]:
    run = [status.run_id]
    info = InfoMetricFamily("distlaunch_run", "The run.", labels=["run"])
    info.add_metric(run, {"name": status.name, "directory": status.directory})
    yield info
    state = StateSetMetricFamily("distlaunch_run_state", "The state of the run.", labels=["run"])
    state.add_metric(run, {name: name == status.state for name in get_args(StateName)})
    yield state
    restarts = CounterMetricFamily(
        "distlaunch_run_restarts", "Restarts of the whole cluster and of single tasks.", labels=["run"]
    )
    restarts.add_metric(run, status.restarts)
    yield restarts
    for name, meaning, value in (
        ("attempt", "The number of the attempt, from 1.", status.attempt),
        ("start_time_seconds", "When the run began, in Unix seconds.", status.started),
    ):
        yield from _gauge(f"distlaunch_run_{name}", meaning, ["run"], [((status.run_id,), value)])
    if status.goodput is not None:
        yield from _gauge(
            "distlaunch_goodput_seconds",
            # No counter: training that turns out to be lost moves from one kind to another.
            "Seconds of the run by kind; their sum is its duration.",
            ["run", "kind"],
            (((status.run_id, kind), value) for kind, value in status.goodput.by_kind().items()),
        )
        share = status.goodput.share
        yield from _gauge("distlaunch_goodput_ratio", "The share of training.", ["run"], [((status.run_id,), share)])


def _families_of_tasks(status: RunStatus) -> Iterator[Metric]:
    tasks = [((status.run_id, task.task, task.node), task) for task in status.tasks]
    info = InfoMetricFamily("distlaunch_task", "The state of the task.", labels=_TASK)
    for at, task in tasks:
        info.add_metric(at, {"state": task.state})
    yield info
    for name, (meaning, find) in _OF_TASK.items():
        yield from _gauge(f"distlaunch_task_{name}", meaning, _TASK, ((at, find(task)) for at, task in tasks))
    yield from _gauge(
        "distlaunch_task_metric",
        "A metric that the program reports, such as its loss.",
        [*_TASK, "name"],
        (((*at, name), value) for at, task in tasks for name, value in task.metrics.items()),
    )


def _gauge(
    name: str, meaning: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], Number]]
) -> Iterator[Metric]:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for at, value in values:
        if value is not None and math.isfinite(value):
            family.add_metric(at, value)
    if family.samples:
        yield family
