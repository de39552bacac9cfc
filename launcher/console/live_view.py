"""The picture below the log lines: the run, its tasks, and a question or help. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from launcher.console.live_tasks import render_tasks
from launcher.console.palette import GREEN, ORANGE, RED, style
from launcher.console.step_history import StepHistory
from launcher.printable import printable
from launcher.report.status_report import RunStatus
from launcher.wording import render_age, render_ago
from worker_entry.protocol.frozen import dataclass

_STATES = {
    "running": style(GREEN, bold=True),
    "succeeded": style(GREEN, bold=True),
    "failed": style(RED, bold=True),
    "stopping": style(ORANGE, bold=True),
    "restarting": style(ORANGE, bold=True),
    "interrupted": style(ORANGE, bold=True),
}


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
        rows: the most lines.
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
