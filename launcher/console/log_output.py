"""Output formats of `distlaunch logs`: lines with their tasks' names, raw lines, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Protocol

from launcher.console.labels import Labels, prefix_lines
from launcher.console.log_lines import LogLines
from launcher.printable import printable
from launcher.tasks import TaskId


class LogOutput(Protocol):
    """Renders lines of tasks, and messages of distlaunch."""

    def render(self, time: float | None, task: TaskId, data: bytes) -> bytes:
        """`data`: whole lines."""

    def render_own(self, time: float | None, level: str, text: str) -> bytes:
        """`text`: a message of distlaunch."""


class LabelledOutput:
    """Lines as the console shows them: control characters are replaced.

    Args:
        tasks: all tasks; without one, there are no labels.
        colour: whether labels and the tasks' own colours are shown.
        timestamps: whether each line begins with its time.
    """

    def __init__(self, tasks: Sequence[TaskId], *, colour: bool, timestamps: bool) -> None:
        self._labels = Labels(tasks, colour=colour) if tasks else None
        self._lines = LogLines(keep_colours=colour, fold=False)
        self._timestamps = timestamps

    def render(self, time: float | None, task: TaskId, data: bytes) -> bytes:
        lines = self._lines.feed(data)
        label = self._labels.of(task) if self._labels is not None else b""
        if self._timestamps:
            label += render_time(time)
        return prefix_lines(label, lines)

    def render_own(self, time: float | None, level: str, text: str) -> bytes:
        return _render_own(time if self._timestamps else None, printable(text))


class RawOutput:
    """Lines byte for byte."""

    def __init__(self, *, timestamps: bool) -> None:
        self._timestamps = timestamps

    def render(self, time: float | None, task: TaskId, data: bytes) -> bytes:
        if not self._timestamps:
            return data
        return prefix_lines(render_time(time), data)

    def render_own(self, time: float | None, level: str, text: str) -> bytes:
        return _render_own(time if self._timestamps else None, text)


class JsonOutput:
    """One JSON object per line, in ASCII, so without control characters."""

    def render(self, time: float | None, task: TaskId, data: bytes) -> bytes:
        head = f'{{"time": {json.dumps(time)}, "task": "{task}", "line": '
        lines = data[:-1].decode("utf-8", "replace").split("\n")
        return "".join([f"{head}{json.dumps(line)}}}\n" for line in lines]).encode()

    def render_own(self, time: float | None, level: str, text: str) -> bytes:
        entry = {"time": time, "task": None, "level": level}
        return "".join([json.dumps({**entry, "line": line}) + "\n" for line in text.split("\n")]).encode()


def render_time(time: float | None) -> bytes:
    """`2026-11-22T06:42:33.123Z `; as many blanks if the time is unknown."""
    try:
        moment = datetime.fromtimestamp(time, timezone.utc) if time is not None else None
    except (ValueError, OverflowError, OSError):  # an index that we did not write
        moment = None
    return b" " * 25 if moment is None else f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z ".encode()


def _render_own(time: float | None, text: str) -> bytes:
    label = render_time(time) if time is not None else b""
    return prefix_lines(label, f"{text}\n".encode("utf-8", "backslashreplace"))
