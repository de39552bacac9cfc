"""The resource use of tasks and nodes in one attempt: the latest samples for requests, all samples for the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.report.samples import (
    NodeUse,
    NodeUseSample,
    ProgressSample,
    TaskUse,
    TaskUseSample,
    sample_progress,
    use_of_node,
    use_of_task,
)
from launcher.rundir.samples import SampleFiles
from launcher.tasks import TaskId, parse_task_id
from worker_entry.protocol.messages import Sampled
from worker_entry.protocol.values import EpochEnd, Progress


class Usage:
    """The measurements of the nodes. Other threads may read only `tasks` and `nodes`."""

    def __init__(self, files: SampleFiles) -> None:
        self._files = files
        self._tasks: dict[TaskId, TaskUseSample] = {}
        self._nodes: dict[str, NodeUseSample] = {}
        self._task_uses: dict[TaskId, TaskUse] = {}
        self._node_uses: dict[str, NodeUse] = {}

    @property
    def tasks(self) -> Mapping[TaskId, TaskUse]:
        """The resource use of each task, as last measured."""
        return dict(self._task_uses)

    @property
    def nodes(self) -> Mapping[str, NodeUse]:
        """The resource use of each node, as last measured."""
        return dict(self._node_uses)

    def note(self, node: str, sampled: Sampled, clock_offset_s: float) -> None:
        """Adds a node's samples; `clock_offset_s`: how far the node's clock is ahead of ours.

        Raises:
            ValueError: a sample names an impossible task.
        """
        time = sampled.time - clock_offset_s
        for sample in sampled.tasks:
            task, use = parse_task_id(sample.task), TaskUseSample(time, sample)
            self._task_uses[task] = use_of_task(self._tasks.get(task), use)
            self._tasks[task] = use
            self._files.write_use(task, use)
        if sampled.node is not None:
            of_node = NodeUseSample(time, node, sampled.node)
            self._node_uses[node] = use_of_node(self._nodes.get(node), of_node)
            self._nodes[node] = of_node
            self._files.write_node(of_node)

    def note_progress(self, task: TaskId, progress: Progress) -> None:
        """Adds the progress that a task has reported."""
        if progress.first_step is not None:
            self._files.write_progress(task, sample_progress(progress), is_last=not progress.training)

    def note_epochs(self, task: TaskId, ends: Sequence[EpochEnd], clock_offset_s: float) -> None:
        """Adds the ends of a task's epochs."""
        for end in ends:
            sample = ProgressSample(end.time - clock_offset_s, end.step, end.epoch, metrics=dict(end.metrics))
            self._files.write_epoch(task, sample)

    def end(self, task: TaskId) -> None:
        """Writes the last progress of a task that has ended."""
        self._files.write_last(task)
