"""The style of lines: a task's label, `worker:1 │ `, in the task's colour; our own messages by their level."""

from __future__ import annotations

from collections.abc import Sequence

import click

from launcher.console.palette import ORANGE, RED, TASKS
from launcher.printable import printable
from launcher.tasks import TaskId


class Labels:
    """Labels of equal width; `tasks`: all tasks."""

    def __init__(self, tasks: Sequence[TaskId], *, colour: bool) -> None:
        self._width = max((len(str(task)) for task in tasks), default=0)
        self._order = {task: index for index, task in enumerate(tasks)}
        self._colour = colour

    def of(self, task: TaskId) -> bytes:
        label = f"{task!s:<{self._width}} │ "
        if self._colour:
            label = click.style(label, fg=TASKS[self._order.get(task, 0) % len(TASKS)])
        return label.encode()


def prefix_lines(label: bytes, lines: bytes) -> bytes:
    """The lines, each with its line break, with the label before each of them."""
    if not label or not lines:
        return lines
    followed = memoryview(lines.replace(b"\n", b"\n" + label))  # cut without a copy: logs may have gigabytes
    return b"".join((label, followed[: -len(label)]))


def style_remark(text: str, *, colour: bool) -> bytes:
    """One of our remarks among a task's lines, with a line break."""
    return (click.style(text, dim=True) if colour else text).encode() + b"\n"


def style_message(level: str, text: str, *, colour: bool) -> str:
    """One of our messages: a note, a warning or an error."""
    text = printable(text)
    if level == "warning":
        text = f"Warning: {text}"
        return click.style(text, fg=ORANGE) if colour else text
    first, line_break, rest = text.partition("\n")
    return (click.style(first, fg=RED) if colour and level == "error" else first) + line_break + rest
