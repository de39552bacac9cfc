"""The live view below the log lines, made from the run's status and the keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.console.live_view import Asked, render_view
from launcher.console.painting import paint, parse_line
from launcher.console.step_history import StepHistory
from launcher.console.terminal import Size
from launcher.report.status_report import RunStatus
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass

REFRESH_S = 0.5
"""The time between two looks at the status."""


@dataclass(frozen=True)
class Seen:
    """The last status, and the reason if the status is missing or old."""

    status: RunStatus | None
    problem: str = ""


@dataclass(frozen=True)
class Unfinished:
    """A line of a task without its line break yet."""

    task: TaskId
    label: bytes
    text: bytes


def render_unfinished(lines: Sequence[Unfinished], size: Size, *, colour: bool) -> list[str]:
    """The lines, if there is no live view."""
    return [paint(parse_line(line.label + line.text), size.columns, colour=colour) for line in lines]


class LiveRegion:
    """The lines of the live view. Keys set `asked` from other threads; the console's thread does the rest.

    Args:
        colour: whether the lines have any style.
        share: the part of the terminal's rows that the live view may take.
        clock: seconds.
    """

    def __init__(self, *, colour: bool, share: float = 0.5, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked = Asked()
        self.look: Callable[[], Seen] | None = None
        """Returns the status; must not block."""
        self._colour = colour
        self._share = share
        self._clock = clock
        self._seen = Seen(None)
        self._due = 0.0
        self._histories: dict[str, StepHistory] = {}
        self._key: object = None
        self._lines: list[str] = []

    @property
    def tasks(self) -> list[str]:
        """The tasks by their numbers, from 1."""
        status = self._seen.status
        return [task.task for task in status.tasks] if status is not None else []

    def lines(self, size: Size, unfinished: Sequence[Unfinished]) -> list[str]:
        """The lines, styled for the terminal."""
        self._refresh()
        if self._seen.status is None and not self._seen.problem:
            return render_unfinished(unfinished, size, colour=self._colour)
        asked = self.asked
        key = size, tuple(unfinished), asked, self._seen
        if key != self._key:
            self._key, self._lines = key, self._render(size, unfinished, asked)
        return self._lines

    def _refresh(self) -> None:
        now = self._clock()
        if self.look is None or now < self._due:
            return
        self._due = now + REFRESH_S
        self._seen = self.look()
        if (status := self._seen.status) is not None:
            for task in status.tasks:
                self._histories.setdefault(task.task, StepHistory()).note(status.now, task.step)

    def _render(self, size: Size, unfinished: Sequence[Unfinished], asked: Asked) -> list[str]:
        status = self._seen.status
        # A task that reports its steps already has a progress bar in its line.
        stepping = {task.task for task in status.tasks if task.step is not None} if status is not None else set()
        shown = [line for line in unfinished if str(line.task) not in stepping]
        view = render_view(
            status,
            self._seen.problem,
            self._histories,
            columns=size.columns,
            rows=max(int(size.rows * self._share), 1),
            asked=asked,
            above=[parse_line(line.label + line.text) for line in shown],
        )
        return [paint(line, size.columns, colour=self._colour) for line in view]
