"""The lines of the live view for tasks: the choice of tasks, and the columns. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from launcher.console.palette import CYAN, GREEN, ORANGE, RED, style
from launcher.printable import printable
from launcher.report.status_report import NodeState, RunStatus, TaskState
from launcher.report.status_text import render_number
from launcher.report.table import fit_columns
from launcher.wording import render_step_time
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.units import render_size

FAILED, HALTED, SLOW, NOT_UP, AT_WORK, ENDED = range(6)
"""The urgency of a task, most urgent first."""
_STYLES = {
    FAILED: style(RED, bold=True),
    HALTED: style(ORANGE, bold=True),
    SLOW: style(ORANGE),
    NOT_UP: "dim",
    AT_WORK: style(GREEN),
    ENDED: "dim",
}
TITLES_FROM = 6
"""With at least this many lines, one has the titles of the columns."""
MINUTE_S = 60.0
BARS = "▁▂▃▄▅▆▇█"
TAIL_S = 3.0
"""For this time after its last step, a task does not count as slower, because its next step may be unknown."""


@dataclass(frozen=True)
class Column:
    """A column. `keep`: if there is no room, the columns with the lowest `keep` are left out.

    `least`, `most`: the minimum and maximum width. `grows`: whether the column takes the remaining room.
    """

    title: str
    keep: int
    render: Callable[[_Shown], str]
    is_right: bool = True
    least: int = 0
    most: int = 0
    grows: bool = False


@dataclass(frozen=True)
class _Shown:
    """The data of one task for the columns; `width` is the width of a column that grows."""

    number: int
    task: TaskState
    status: RunStatus
    history: StepHistory | None
    width: int = 0


def render_tasks(
    status: RunStatus, histories: Mapping[str, StepHistory], *, columns: int, rows: int, selected: str = ""
) -> list[Text]:
    """At most `rows` lines of `columns` characters: the most urgent tasks, and the number of the others."""
    if rows < 1 or not status.tasks:
        return []
    titles = rows >= TITLES_FROM
    room = rows - titles
    chosen = choose_tasks(status.tasks, room if len(status.tasks) <= room else room - 1)
    shown = [_Shown(number, task, status, histories.get(task.task)) for number, task in chosen]
    lines = _render_table(shown, columns, titles=titles, selected=selected)
    left = [task for task in status.tasks if task not in [each.task for each in shown]]
    if left:
        states = Counter(render_state(task) for task in left)
        what = ", ".join(f"{count} {state}" for state, count in states.most_common())
        lines.append(Text(f"  +{len(left)} more: {what}", "dim"))
    return lines[:rows]


def choose_tasks(tasks: Sequence[TaskState], room: int) -> list[tuple[int, TaskState]]:
    """The most urgent tasks, each with its number, from 1; the chief is always one of them."""
    numbered = [*enumerate(tasks, 1)]
    if len(numbered) <= room:
        return numbered
    chief = next((task.task for task in tasks if task.task.startswith("chief:")), "worker:0")

    def urgency(item: tuple[int, TaskState]) -> tuple[bool, int, float]:
        return item[1].task != chief, rank(item[1]), -(item[1].own_s or 0.0)

    chosen = sorted(numbered, key=urgency)[: max(room, 0)]
    return sorted(chosen, key=lambda item: (rank(item[1]), item[0]))


def rank(task: TaskState) -> int:
    """The urgency of a task; the most urgent has the lowest rank."""
    if task.state == "exit status 0":
        return ENDED
    if task.state.startswith(("exit status", "SIG", "signal", "unknown:")):
        return FAILED
    if task.state == "stopped by a signal":
        return HALTED
    if task.slow:
        return SLOW
    return NOT_UP if task.state.startswith(("waiting ", "has not ", "importing ")) else AT_WORK


def render_state(task: TaskState) -> str:
    return _clean(f"slow: {task.slow}" if rank(task) == SLOW else task.state)


def render_bar(share: float, width: int) -> str:
    """A bar such as `━━━╸──`."""
    halves = round(max(0.0, min(share, 1.0)) * width * 2)
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(width, "─")


def _render_table(shown: Sequence[_Shown], columns: int, *, titles: bool, selected: str) -> list[Text]:
    cells = {column: [column.render(each) for each in shown] for column in _COLUMNS}
    used = [column for column in _COLUMNS if any(cells[column])]
    natural = {place: _natural(column, cells[column], titles=titles) for place, column in enumerate(used)}
    keep = {place: column.keep for place, column in enumerate(used)}
    least = {place: column.least for place, column in enumerate(used) if column is _STATE}
    fitting = fit_columns(natural, keep=keep, least=least, room=columns, gap=1)
    widths = {used[place]: width for place, width in fitting.items()}
    used = [*widths]
    left = columns - sum(widths[column] + 1 for column in used) + 1
    for column in used:
        if column.grows:
            more = max(min(left, column.most - widths[column]), 0)
            widths[column] += more
            left -= more
    lines = [Text(" ".join(_fit(column.title, widths[column], column) for column in used), "dim")] if titles else []
    for number, each in enumerate(shown):
        line = Text(style="" if not selected or each.task.task == selected else "dim")
        for place, column in enumerate(used):
            text = cells[column][number]
            if column.grows and text:
                text = column.render(_Shown(each.number, each.task, each.status, each.history, widths[column]))
            style = _STYLES[rank(each.task)] if column is _STATE else _CELL_STYLES.get(column.title, "")
            line.append(" " * (place > 0)).append(_fit(text, widths[column], column), style)
        lines.append(line)
    return lines


def _natural(column: Column, cells: Sequence[str], *, titles: bool) -> int:
    widest = max(*map(cell_len, cells), cell_len(column.title) if titles else 0)
    return min(max(widest, column.least), column.most) if column.most else widest


def _fit(text: str, width: int, column: Column) -> str:
    if cell_len(text) > width:
        return set_cell_size(text, max(width - 1, 0)) + "…" * (width > 0)
    return " " * (width - cell_len(text)) + text if column.is_right else set_cell_size(text, width)


def _clean(text: str) -> str:
    return " ".join(printable(text).split())


def _of_total(now: int | None, total: int | None) -> str:
    return "" if now is None else f"{now:,}" + (f"/{total:,}" if total is not None else "")


def _render_step(shown: _Shown) -> str:
    return _of_total(shown.task.step, shown.task.total_steps)


def _render_progress(shown: _Shown) -> str:
    step, total = shown.task.step, shown.task.total_steps
    return render_bar(step / total, shown.width or 8) if step is not None and total else ""


def _render_rate(shown: _Shown) -> str:
    return f"{1 / shown.task.step_s:.3g}" if shown.task.step_s and rank(shown.task) in (AT_WORK, SLOW) else ""


def _render_gpu(shown: _Shown) -> str:
    node: NodeState | None = next((node for node in shown.status.nodes if node.node == shown.task.node), None)
    uses = [gpu.use for gpu in node.gpus if gpu.gpu in shown.task.gpus and gpu.use is not None] if node else []
    return f"{sum(uses) / len(uses):.0%}" if uses else ",".join(map(_clean, shown.task.gpus))


def _render_spark(shown: _Shown) -> str:
    count = shown.width or 6
    rates = shown.history.rates(shown.status.now, count) if shown.history is not None else []
    return render_spark(rates, count) if rates else ""


_STATE = Column("STATE", 100, lambda shown: render_state(shown.task), is_right=False, least=8, most=56)
_COLUMNS = (
    Column("", 95, lambda shown: str(shown.number)),
    Column("TASK", 110, lambda shown: _clean(shown.task.task), is_right=False),
    _STATE,
    Column("EPOCH", 40, lambda shown: _of_total(shown.task.epoch, shown.task.total_epochs)),
    Column("STEP", 90, _render_step),
    Column("PROGRESS", 75, _render_progress, is_right=False, least=8, most=24, grows=True),
    Column("STEPS/S", 85, _render_rate),
    Column("LOSS", 80, lambda shown: render_number(shown.task.metrics.get("loss"), "")),
    Column("CPU", 60, lambda shown: "" if shown.task.cpu is None else f"{shown.task.cpu:.0%}"),
    Column("MEM", 45, lambda shown: "" if shown.task.memory is None else render_size(shown.task.memory)),
    Column("GPU", 55, _render_gpu),
    Column("OWN", 65, lambda shown: "" if shown.task.own_s is None else render_step_time(shown.task.own_s)),
    Column("MINUTE", 50, _render_spark, is_right=False, least=6, most=30, grows=True),
)
_CELL_STYLES = {"": "dim", "TASK": "bold", "PROGRESS": style(CYAN), "MINUTE": style(CYAN)}


class StepHistory:
    """The step numbers of one task, each with the time at which it was first seen."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._steps: list[int] = []

    def note(self, time: float, step: int | None) -> None:
        """Records the number of the last step; `time`: Unix seconds."""
        if step is None or (self._steps and step < self._steps[-1]):  # the task was restarted
            self._times, self._steps = [], []
        if step is not None and (not self._steps or step > self._steps[-1]):
            self._times.append(time)
            self._steps.append(step)
        while len(self._times) > 2 and self._times[1] < time - MINUTE_S:
            del self._times[0], self._steps[0]

    def rates(self, now: float, count: int) -> list[float]:
        """Steps per second in equal parts of the last minute, oldest first; only parts with known steps."""
        if len(self._times) < 2:
            return []
        last, usual_s = self._times[-1], (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        end = last if now - last < max(TAIL_S, 2 * usual_s) else now
        size = MINUTE_S / count
        edges = [end - size * number for number in range(count, -1, -1)]
        first = self._times[0]
        return [
            (self._step_at(late) - self._step_at(max(early, first))) / (late - max(early, first))
            for early, late in pairwise(edges)
            if late - first > size / 2
        ]

    def _step_at(self, time: float) -> float:
        """Between two changes, the steps are spread evenly."""
        after = bisect_right(self._times, time)
        if after == len(self._times):
            return float(self._steps[-1])
        early, late = self._times[after - 1], self._times[after]
        done = self._steps[after] - self._steps[after - 1]
        return self._steps[after - 1] + done * (time - early) / (late - early)


def render_spark(rates: Sequence[float], count: int) -> str:
    """A chart such as `▁▂▅█` of `count` characters; the highest is the fastest, and a blank stands for no step."""
    top = max(rates, default=0.0)
    bars = "".join(" " if rate <= 0 else BARS[min(int(rate / top * 8), 7)] for rate in rates)
    return bars.rjust(count)
