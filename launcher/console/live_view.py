"""The live view below the log lines, made from the run's status and the keys.

It shows the run, its tasks, and a question or help.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from launcher.console.live_tasks import StepHistory, render_tasks
from launcher.console.palette import GREEN, ORANGE, RED, style
from launcher.console.terminal import Size
from launcher.printable import printable
from launcher.report.status_report import RunStatus
from launcher.tasks import TaskId
from launcher.wording import render_age, render_ago
from worker_entry.protocol.frozen import dataclass

REFRESH_S = 0.5
"""The time between two reads of the status."""
_STATES = {
    "running": style(GREEN, bold=True),
    "succeeded": style(GREEN, bold=True),
    "failed": style(RED, bold=True),
    "stopping": style(ORANGE, bold=True),
    "restarting": style(ORANGE, bold=True),
    "interrupted": style(ORANGE, bold=True),
}
TAB = 8


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


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user has selected with keys.

    `help`: lines that explain the keys, in place of the tasks. `prompt`: a question that waits for an answer.
    `selected`: the only task whose log is shown. `hint`: how to get help, at the end of the header.
    """

    help: Sequence[str] = ()
    prompt: str = ""
    selected: str = ""
    hint: str = ""


def render_view(
    status: RunStatus | None,
    problem: str,
    histories: Mapping[str, StepHistory],
    *,
    columns: int,
    rows: int,
    asked: Asked = Asked(),  # noqa: B008 - it is frozen
    above: Sequence[Text] = (),
) -> list[Text]:
    """At most `rows` lines: the header, a question or help, unfinished lines of tasks, and the tasks.

    Args:
        status: the status of the run; None if it is not known yet.
        problem: why the status is missing or old.
        histories: the last minute of each task.
        columns: the width of the terminal.
        rows: the maximum number of lines.
        asked: what the user has selected with keys.
        above: unfinished lines of tasks, such as progress bars.
    """
    lines = [_render_header(status, problem, columns, asked)]
    if asked.prompt:
        lines.append(Text(asked.prompt, "bold"))
    if asked.help:
        return [*lines, *map(Text, asked.help)][:rows]
    lines += above[: max((rows - len(lines)) // 2, 0)]
    if status is not None:
        left = rows - len(lines)
        lines += render_tasks(status, histories, columns=columns, rows=left, selected=asked.selected)
    return lines[:rows]


def _render_header(status: RunStatus | None, problem: str, columns: int, asked: Asked) -> Text:
    """`── two-nodes: running · attempt 2 · 3 min 20 s · 5 min left ──── ? keys ──`."""
    line = Text().append("── ", "dim")
    parts = []
    if status is not None:
        line.append(f"{_clean(status.name)}: ").append(status.state, _STATES.get(status.state, ""))
        if status.attempt:
            parts.append(f"attempt {status.attempt}")
        parts.append(render_age((status.now if status.ended is None else status.ended) - status.started))
        if status.ended is not None:
            parts.append(f"ended {render_ago(status.ended, status.now)}")
        if status.eta_s is not None:
            parts.append(f"{render_age(status.eta_s)} left")
    if asked.selected:
        parts.append(f"only {asked.selected}")
    line.append("".join(f" · {part}" for part in parts))
    if problem:
        line.append(f"{' · ' if status is not None else ''}{_clean(problem)}", style(ORANGE, bold=True))
    end = f" {asked.hint} ──" if asked.hint else ""
    room = columns - cell_len(line.plain) - 1
    if room < len(end):
        end = ""
    return line.append(f" {'─' * (room - len(end))}{end}" if room > 0 else "", "dim")


def _clean(text: str) -> str:
    return " ".join(printable(text).split())


def paint(line: Text, columns: int, *, colour: bool) -> str:
    """The line, cut to the width of the terminal; without any style unless `colour`."""
    line = line.copy()
    line.stylize_before(line.style)
    line.expand_tabs(TAB)
    line.truncate(columns, overflow="ellipsis")
    if not colour:
        return line.plain
    return "".join(
        # Colours come from the program or are one of our 16, so the terminal shows no others than in log lines.
        segment.style.render(segment.text, color_system=ColorSystem.TRUECOLOR) if segment.style else segment.text
        for segment in line.render(_console(), end="")
    )


def parse_line(line: bytes) -> Text:
    """A line of a program, with colours and no other control characters."""
    return Text.from_ansi(line.decode("utf-8", "replace").replace("\n", " "))


def paint_plain(line: str, columns: int) -> str:
    """The line without style, cut to the width of the terminal."""
    return paint(Text(line), columns, colour=False)


@lru_cache(1)
def _console() -> Console:
    return Console(width=80, color_system=None)
