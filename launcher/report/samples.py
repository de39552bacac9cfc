"""Measurements of tasks and nodes over time: the lines of sample files, and the rates between two samples.

Each task has a file in each attempt, `worker-1.samples.jsonl`; all nodes share a file, `nodes.samples.jsonl`. Each line
is an object whose `sample` is `progress` (how far a task was), `use` (what the task had used by then) or `node` (what a
node had used by then). Times are Unix seconds by the controller's clock. In a file that has grown too long, older lines
are further apart; see `rundir.samples.thin_lines`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.samples import NodeSample, TaskSample
from worker_entry.protocol.values import Progress


@dataclass(frozen=True)
class ProgressSample:
    """How far a task was; see `Progress`."""

    time: float
    step: int
    epoch: int | None = None
    step_s: float | None = None
    own_s: float | None = None
    data_s: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskUseSample:
    """The resources that a task had used by `time`."""

    time: float
    use: TaskSample


@dataclass(frozen=True)
class NodeUseSample:
    """The resources that a node had used by `time`."""

    time: float
    node: str
    use: NodeSample


Sample = ProgressSample | TaskUseSample | NodeUseSample

_KINDS: dict[str, type] = {"progress": ProgressSample, "use": TaskUseSample, "node": NodeUseSample}
_NAMES = {cls: name for name, cls in _KINDS.items()}


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def sample_progress(progress: Progress) -> ProgressSample:
    """The sample of a task that has done a step."""
    return ProgressSample(
        time=progress.time,
        step=progress.step,
        epoch=progress.epoch,
        step_s=progress.step_s,
        own_s=progress.own_s,
        data_s=progress.data_s,
        metrics=dict(progress.metrics),
    )


def render_sample(sample: Sample) -> bytes:
    """Renders the line, with its line break; omits fields with their default values."""
    cls: Any = type(sample)
    values: bytes = _adapter(cls).dump_json(sample, exclude_defaults=True)
    return b'{"sample":"%s",%s\n' % (_NAMES[cls].encode(), values[1:])


def parse_samples(lines: Iterable[bytes]) -> Iterator[Sample]:
    """Yields the samples of a file's lines, in order; ignores torn and malformed lines."""
    for line in lines:
        cls = _KINDS.get(kind_of(line))
        if cls is not None:
            try:
                yield _adapter(cls).validate_json(line)
            except ValidationError:
                continue


def kind_of(line: bytes) -> str:
    """The `sample` of a line; empty if it has none."""
    return line[len(_BEGINNING) :].partition(b'"')[0].decode("ascii", "replace") if line.startswith(_BEGINNING) else ""


_BEGINNING = b'{"sample":"'


@dataclass(frozen=True)
class TaskUse:
    """The resources that a task uses between two samples; None for unknown values.

    `cpu`: cores. `starved`: runnable threads without a core, on average. `memory`, `swapped`: bytes.
    `read_s`, `written_s`: bytes per second.
    """

    time: float
    cpu: float | None
    starved: float | None
    memory: int
    swapped: int
    threads: int
    read_s: float | None
    written_s: float | None


@dataclass(frozen=True)
class NodeUse:
    """The same for a node: `cpu` in cores, the network in bytes per second; `sample` has the rest."""

    time: float
    cpu: float | None
    received_s: float | None
    sent_s: float | None
    sample: NodeSample


def use_of_task(before: TaskUseSample | None, after: TaskUseSample) -> TaskUse:
    """The use of a task between the samples; `before` is None for the first sample."""
    rate = _rates(before, after)
    return TaskUse(
        time=after.time,
        cpu=rate("cpu_s"),
        starved=rate("starved_s"),
        memory=after.use.memory,
        swapped=after.use.swapped,
        threads=after.use.threads,
        read_s=rate("read"),
        written_s=rate("written"),
    )


def use_of_node(before: NodeUseSample | None, after: NodeUseSample) -> NodeUse:
    """The use of a node between the samples; `before` is None for the first sample."""
    rate = _rates(before, after)
    return NodeUse(
        time=after.time, cpu=rate("cpu_s"), received_s=rate("received"), sent_s=rate("sent"), sample=after.use
    )


def _rates(
    before: TaskUseSample | NodeUseSample | None, after: TaskUseSample | NodeUseSample
) -> Callable[[str], float | None]:
    """Returns a function that gives a counter's growth per second between the samples; None if unknown."""

    def rate(name: str) -> float | None:
        first = getattr(before.use, name) if before is not None else None
        last = getattr(after.use, name)
        if before is None or first is None or last is None or after.time <= before.time:
            return None
        # A counter falls if a process of the task is gone, or the task was started again.
        return float(max(last - first, 0.0) / (after.time - before.time))

    return rate
