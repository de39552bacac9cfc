"""The curves of training and of the machines.

Many curves are shown as a few: their median, the band in which most of them lie, and by name those that differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from launcher.pages.page_data import NodeSamples, PageData, TaskSamples
from launcher.pages.series import Point, Series, downsample, make_series, quantile
from launcher.report.samples import (
    NodeUse,
    ProgressSample,
    TaskUse,
    use_of_node,
    use_of_task,
)
from worker_entry.protocol.frozen import dataclass, replace
from worker_entry.protocol.samples import GpuSample

POINTS = 60_000
"""Total points of all curves of a page: about 0.8 MB."""
MOST_POINTS = 2000
"""Points of one curve: more than the columns of a screen."""
LEAST_POINTS = 100
METRICS = 24
"""How many metrics have a chart."""
MOST_CURVES = 12
"""More curves cannot be told apart."""
WINDOWS = 200
"""How many windows of time the values are grouped into."""
BAND = (0.1, 0.9)
"""The shares of the curves below the band's edges."""
ODD = 6
"""The most curves that are shown by name."""
FAR, LEAST_SHARE = 5.0, 0.1
"""A curve differs if its median is further from the middle than FAR times the usual distance, and than LEAST_SHARE."""


@dataclass(frozen=True)
class Chart:
    """Curves over the time of the run.

    `key`: the chart's anchor. `unit`: the unit of the values, see `wording.render_value`. `grouped`: how many curves
    are shown as a few; see `group_curves`. `marks`: the kinds and positions of vertical lines in this chart only.
    """

    key: str
    title: str
    unit: str
    series: Sequence[Series]
    about: str = ""
    grouped: int = 0
    marks: Sequence[tuple[str, float]] = ()


def make_training_charts(data: PageData) -> list[Chart]:
    """Loss, all other metrics, steps per second, step times; only charts that have values."""
    tasks = data.tasks
    names = dict.fromkeys(name for each in tasks for sample in each.progress for name in sample.metrics)
    metrics = sorted(names, key=lambda name: (name != "loss", "loss" not in name))
    charts = [
        _chart(f"metric-{number}", name, "", _curves(tasks, functools.partial(_metric, name)))
        for number, name in enumerate(metrics[:METRICS])
    ]
    charts += [
        _chart("steps", "Steps per second", "steps/s", _curves(tasks, _step_rates)),
        _chart(
            "step-time",
            "Step time, p50 and p99",
            "s",
            _step_quantiles(data),
            "Over all workers, in windows of time; each measurement is the mean of about one second of steps.",
        ),
        _chart(
            "own-time",
            "Own time of a step",
            "s",
            _curves(tasks, lambda samples: [(each.time, each.own_s) for each in samples]),
            "Step time without waiting for other workers. In synchronous training the slowest worker has the highest "
            "curve here and the lowest in the next chart.",
        ),
        _chart("waiting-time", "Waiting for the others in a step", "s", _curves(tasks, _waiting)),
        _chart(
            "data-time",
            "Waiting for input in a step",
            "s",
            _curves(tasks, lambda samples: [(each.time, each.data_s) for each in samples]),
            "The part of the own time that the program spends waiting for its next batch.",
        ),
    ]
    return [chart for chart in charts if chart.series]


def make_machine_charts(data: PageData) -> list[Chart]:
    """The resource usage of nodes, GPUs and tasks; only charts that have values."""
    nodes = data.nodes
    tasks = [(each.task, [*map(use_of_task, (None, *each.use), each.use)]) for each in data.tasks]
    of_nodes = [(each.node, [*map(use_of_node, (None, *each.use), each.use)]) for each in nodes]
    charts = [
        _chart("node-cpu", "CPU per node", "cores", _node_curves(of_nodes, lambda use: use.cpu)),
        _chart("node-memory", "Memory per node", "B", _node_curves(of_nodes, lambda use: use.sample.memory)),
        _chart(
            "node-received", "Network per node, received", "B/s", _node_curves(of_nodes, lambda use: use.received_s)
        ),
        _chart("node-sent", "Network per node, sent", "B/s", _node_curves(of_nodes, lambda use: use.sent_s)),
        _chart("gpu-use", "GPU use", "%", _gpu_curves(nodes, lambda gpu: None if gpu.use is None else gpu.use * 100)),
        _chart("gpu-memory", "GPU memory", "B", _gpu_curves(nodes, lambda gpu: gpu.memory)),
        _chart("gpu-power", "GPU power", "W", _gpu_curves(nodes, lambda gpu: gpu.power_w)),
        _chart("gpu-temperature", "GPU temperature", "°C", _gpu_curves(nodes, lambda gpu: gpu.celsius)),
        _chart("task-cpu", "CPU per task", "cores", _use_curves(tasks, lambda use: use.cpu)),
        _chart(
            "task-starved",
            "Threads without a core, per task",
            "threads",
            _use_curves(tasks, lambda use: use.starved),
            "Average number of runnable threads that waited for a core.",
        ),
        _chart("task-memory", "Memory per task", "B", _use_curves(tasks, lambda use: use.memory)),
        _chart("task-swapped", "Swapped out, per task", "B", _unless_zero(_use_curves(tasks, lambda use: use.swapped))),
        _chart("task-read", "Read per task", "B/s", _use_curves(tasks, lambda use: use.read_s), _THROUGH),
        _chart("task-written", "Written per task", "B/s", _use_curves(tasks, lambda use: use.written_s), _THROUGH),
    ]
    return [chart for chart in charts if chart.series]


_THROUGH = "Includes files, pipes and sockets."


def thin(charts: Sequence[Chart]) -> list[Chart]:
    """The same charts with at most about `POINTS` points in total."""
    curves = sum(len(chart.series) for chart in charts)
    limit = min(max(POINTS // max(curves, 1), LEAST_POINTS), MOST_POINTS)
    return [
        replace(chart, series=[replace(each, points=downsample(each.points, limit)) for each in chart.series])
        for chart in charts
    ]


def _chart(key: str, title: str, unit: str, series: Iterable[Series], about: str = "") -> Chart:
    curves = [each for each in series if each.values]
    shown = group_curves(curves)
    return Chart(key, title, unit, shown, about, len(curves) if len(curves) > MOST_CURVES else 0)


_Values = Sequence[tuple[float, "float | None"]]


def _curves(tasks: Sequence[TaskSamples], values: Callable[[Sequence[ProgressSample]], _Values]) -> Iterator[Series]:
    for task in dict.fromkeys(each.task for each in tasks):
        yield make_series(task, [values(each.progress) for each in tasks if each.task == task])


def _metric(name: str, samples: Sequence[ProgressSample]) -> _Values:
    return [(each.time, each.metrics.get(name)) for each in samples]


def _step_rates(samples: Sequence[ProgressSample]) -> _Values:
    return [
        (after.time, (after.step - before.step) / (after.time - before.time))
        for before, after in pairwise(samples)
        if after.time > before.time and after.step >= before.step
    ]


def _waiting(samples: Sequence[ProgressSample]) -> _Values:
    return [
        (each.time, max(each.step_s - each.own_s, 0.0))
        for each in samples
        if each.step_s is not None and each.own_s is not None
    ]


def _step_quantiles(data: PageData) -> list[Series]:
    """p50 and p99 of the step times in each of many windows of time, in each attempt."""
    width = data.duration / WINDOWS
    p50: list[_Values] = []
    p99: list[_Values] = []
    for attempt in dict.fromkeys(each.attempt for each in data.tasks):
        windows: dict[int, list[tuple[float, float]]] = {}
        for task in data.tasks:
            for sample in task.progress if task.attempt == attempt else ():
                if sample.step_s is not None:
                    window = int((sample.time - data.started) / width)
                    windows.setdefault(window, []).append((sample.time, sample.step_s))
        middles = {window: median(time for time, _ in found) for window, found in windows.items()}
        ordered = {window: sorted(value for _, value in found) for window, found in windows.items()}
        p50.append([(middles[window], quantile(ordered[window], 0.5)) for window in sorted(windows)])
        p99.append([(middles[window], quantile(ordered[window], 0.99)) for window in sorted(windows)])
    return [make_series("p50", p50), make_series("p99", p99)]


def _use_curves(
    uses: Sequence[tuple[str, Sequence[TaskUse]]], value: Callable[[TaskUse], float | None]
) -> list[Series]:
    return [
        make_series(name, [[(use.time, value(use)) for use in each] for task, each in uses if task == name])
        for name in dict.fromkeys(task for task, _ in uses)
    ]


def _node_curves(
    uses: Sequence[tuple[str, Sequence[NodeUse]]], value: Callable[[NodeUse], float | None]
) -> list[Series]:
    return [
        make_series(name, [[(use.time, value(use)) for use in each] for node, each in uses if node == name])
        for name in dict.fromkeys(node for node, _ in uses)
    ]


def _gpu_curves(nodes: Sequence[NodeSamples], value: Callable[[GpuSample], float | None]) -> Iterator[Series]:
    for node in dict.fromkeys(each.node for each in nodes):
        samples = [each.use for each in nodes if each.node == node]
        for gpu in dict.fromkeys(gpu.gpu for use in samples for each in use for gpu in each.use.gpus):
            pieces = [
                [(each.time, value(found)) for each in use for found in each.use.gpus if found.gpu == gpu]
                for use in samples
            ]
            yield make_series(f"{node} GPU {gpu}", pieces)


def _unless_zero(series: Iterable[Series]) -> list[Series]:
    """Nothing if all values are 0."""
    curves = list(series)
    return curves if any(value for each in curves for value in each.values) else []


def group_curves(curves: Sequence[Series]) -> list[Series]:
    """The curves, if there are few of them; otherwise the median, the edges of the band, and the curves that differ."""
    if len(curves) <= MOST_CURVES:
        return list(curves)
    windows = _group_by_time(curves)
    below, above = ([(at, quantile(values, share)) for at, values in windows] for share in BAND)
    middle: list[Point] = [(at, median(values)) for at, values in windows]
    return [
        Series(f"median of {len(curves)}", middle),
        Series(f"{BAND[0]:.0%} are below", below),
        Series(f"{BAND[1]:.0%} are below", above, fills=True),
        *find_odd(curves),
    ]


def find_odd(curves: Sequence[Series]) -> list[Series]:
    """The curves that differ from most of the others, in their order; at most ODD, the furthest."""
    typical = [median(each.values) for each in curves]
    centre = median(typical)
    usual = median(abs(value - centre) for value in typical)
    limit = max(FAR * usual, LEAST_SHARE * abs(centre))
    away = {index: abs(value - centre) for index, value in enumerate(typical) if abs(value - centre) > limit}
    furthest = sorted(away, key=lambda index: -away[index])[:ODD]
    return [curves[index] for index in sorted(furthest)]


def _group_by_time(curves: Sequence[Series]) -> list[tuple[float, list[float]]]:
    """The middle of each window of time that has values, and the ordered values of the curves in it, one for each."""
    times = [time for each in curves for time, value in each.points if value is not None]
    first, width = min(times), (max(times) - min(times)) / WINDOWS or 1.0
    windows: dict[int, dict[int, list[float]]] = {}
    for index, each in enumerate(curves):
        for time, value in each.points:
            if value is not None:
                windows.setdefault(int((time - first) / width), {}).setdefault(index, []).append(value)
    return [
        (first + (number + 0.5) * width, sorted(map(fmean, windows[number].values()))) for number in sorted(windows)
    ]
