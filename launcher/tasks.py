"""Names of tasks, as in TensorFlow: `worker:1`; and of this machine as their node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

LOCAL = "local"
"""The `host` of this machine."""
WORKERS = 2
"""The default number of workers of a cluster on this machine."""
DEMO = "worker_entry.demo.train"
"""The module that TensorFlow's workers run without a program."""

TaskType = Literal["chief", "worker", "ps", "evaluator"]
TASK_TYPES: tuple[TaskType, ...] = get_args(TaskType)

AuxiliaryType = Literal["tensorboard"]
"""Processes that run in addition to the spec's tasks."""
AUXILIARY_TYPES: tuple[AuxiliaryType, ...] = get_args(AuxiliaryType)

TRAINING_TYPES: tuple[TaskType, ...] = ("chief", "worker")
"""The types whose tasks train: they make up the world size, and their exits decide the run's outcome."""


def name_local(tasks: int) -> str:
    """The name of a cluster that the command line describes, with this number of tasks on this machine."""
    return f"{LOCAL}-{tasks}"


class TaskId(NamedTuple):
    """One process of the cluster; unique in a run."""

    type: TaskType | AuxiliaryType
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used here

    @property
    def trains(self) -> bool:
        return self.type in TRAINING_TYPES

    @property
    def is_auxiliary(self) -> bool:
        """Whether the process is not one of the spec's tasks: its end does not affect the run."""
        return self.type in AUXILIARY_TYPES

    @property
    def file_name(self) -> str:
        """`worker-1`, for the names of files and folders."""
        return f"{self.type}-{self.index}"

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        """Represents a task as its name in JSON."""
        from pydantic_core import core_schema

        text = core_schema.no_info_after_validator_function(parse_task_id, core_schema.str_schema())
        known = core_schema.is_instance_schema(cls)
        return core_schema.json_or_python_schema(
            text,
            core_schema.union_schema([known, text]),
            serialization=core_schema.to_string_ser_schema(when_used="always"),
        )


TENSORBOARD = TaskId("tensorboard", 0)


def parse_task_id(text: str) -> TaskId:
    """`worker:1` → TaskId.

    Raises:
        ValueError: the text is not a task's name.
    """
    task_type, _, index = text.partition(":")
    for known in (*TASK_TYPES, *AUXILIARY_TYPES):
        if task_type == known and index.isascii() and index.isdigit():
            return TaskId(known, int(index))
    raise ValueError(f"{text!r} is not a task; tasks are named like worker:0")


class TaskPattern(NamedTuple):
    """One task, or all tasks of a type if `index` is None."""

    type: TaskType | AuxiliaryType
    index: int | None  # type: ignore[assignment]  # as in TaskId

    def matches(self, task: TaskId) -> bool:
        return task.type == self.type and self.index in (None, task.index)

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def parse_task_pattern(text: str) -> TaskPattern:
    """`worker:1`, `worker-1` or `worker` → TaskPattern.

    Raises:
        ValueError: the text names neither a task nor a type of tasks.
    """
    for known in (*TASK_TYPES, *AUXILIARY_TYPES):
        if text == known:
            return TaskPattern(known, None)
    return TaskPattern(*parse_task_id(text.replace("-", ":", 1)))


def find_leader(tasks: Iterable[TaskId]) -> TaskId | None:
    """The task that runs the coordination service to which all others connect."""
    trainers = [task for task in tasks if task.trains and task.index == 0]
    return min(trainers, key=lambda task: TASK_TYPES.index(task.type), default=None)


def name_tasks(tasks: Iterable[TaskId], limit: int = 8) -> str:
    """`worker:0, worker:1 and 6 more`."""
    ordered = sorted(tasks)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(map(str, ordered[:limit])) + more
