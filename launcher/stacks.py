"""What all tasks of a cluster are doing just now: their Python stacks, with equal ones told together. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from launcher.tasks import TaskId

GROUP_LIMIT = 8
"""Tasks that are named one by one."""
PATIENCE_S = 5.0

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")
_OURS = re.compile(r"/worker_entry/\w+\.py$")

Frame = tuple[str, int, str]
"""File, line and function."""


class StackCollector:
    """What the tasks have answered since all were asked at `now`, in monotonic seconds."""

    def __init__(self, tasks: Iterable[TaskId], now: float) -> None:
        self._missing = set(tasks)
        self._deadline = now + PATIENCE_S
        self._texts: dict[TaskId, str] = {}

    def note(self, task: TaskId, text: str) -> None:
        self._texts[task] = text
        self._missing.discard(task)

    def render(self, now: float) -> str | None:
        """The answer, once all tasks have given theirs, or have had their time."""
        if self._missing and now < self._deadline:
            return None
        return render_stacks({**dict.fromkeys(self._missing, ""), **self._texts})


def render_stacks(texts: Mapping[TaskId, str]) -> str:
    """A line for each group of tasks that are at the same place, and that place's stack below it.

    Args:
        texts: what faulthandler has written of each task; empty if it has written nothing.
    """
    groups: dict[tuple[Frame, ...], list[TaskId]] = {}
    for task in sorted(texts):
        groups.setdefault(parse_main_thread(texts[task]), []).append(task)
    lines = []
    for frames, tasks in sorted(groups.items(), key=lambda group: (-len(group[1]), group[1])):
        lines.append(f"{_names(tasks)} {_place(frames, len(tasks))}")
        lines += [f"    {file}:{line} {function}" for file, line, function in frames]
    return "\n".join(lines)


def parse_main_thread(text: str) -> tuple[Frame, ...]:
    """The frames of the main thread, innermost first, as faulthandler has written them last; ours left out."""
    parts = _THREAD.split(text)
    if len(parts) < 2:
        return ()
    # A process lists its main thread last, which was its first.
    frames = [(file, int(line), function) for file, line, function in _FRAME.findall(parts[-1])]
    while frames and (_OURS.search(frames[-1][0]) or frames[-1][0].startswith("<frozen")):
        frames.pop()
    return tuple(frames)


def _place(frames: Sequence[Frame], tasks: int) -> str:
    if not frames:
        return f"{'has' if tasks == 1 else 'have'} no Python stack to show"
    own = next((frame for frame in frames if not any(part in frame[0] for part in _LIBRARIES)), frames[0])
    where = f"{'is' if tasks == 1 else 'are'} at {own[0]}:{own[1]} {own[2]}"
    inner = frames[0]
    return where if inner is own else f"{where}, in {inner[2]} of {inner[0].rpartition('/')[2]}"


def _names(tasks: Sequence[TaskId]) -> str:
    more = f" and {len(tasks) - GROUP_LIMIT} more" if len(tasks) > GROUP_LIMIT else ""
    return ", ".join(map(str, tasks[:GROUP_LIMIT])) + more
