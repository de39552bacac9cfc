"""A run's status and report as HTML, for the output of a notebook's cell. All text is escaped. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from launcher.report.models import RunReport
from launcher.report.run_text import render_end, render_error, render_outcome
from launcher.report.status_report import RunStatus
from launcher.report.status_text import COLUMNS, make_rows, render_header
from launcher.report.table import EMPTY

SHOWN_TASKS = 64
"""The most tasks that a table has."""


def render_status(status: RunStatus) -> str:
    """The state of the run, and a row for each task."""
    titles = [column.title.capitalize() for column in COLUMNS]
    return f"<p><b>{escape(render_header(status))}</b></p>{_render_table(titles, make_rows(status))}"


def render_report(report: RunReport) -> str:
    """How the run ended, the cause with its evidence, and a row for each task of the last attempt."""
    lines = [f"<p><b>{escape(f'{report.run_id}: {render_outcome(report)}')}</b></p>"]
    if report.outcome != "succeeded":
        lines.append(f"<pre>{escape(render_error(report.verdict))}</pre>")
    if report.attempts:
        rows = [
            [
                task.task,
                task.node,
                render_end(task),
                EMPTY if task.progress is None else f"{task.progress.step:,}",
                task.log,
            ]
            for task in report.attempts[-1].tasks
        ]
        lines.append(_render_table(["Task", "Node", "End", "Step", "Log"], rows))
    lines.append(f"<p>Logs: <code>{escape(report.directory)}</code></p>")
    return "".join(lines)


def _render_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The columns that have a value."""
    used = [place for place in range(len(titles)) if any(row[place] != EMPTY for row in rows)]
    head = "".join(f"<th>{escape(titles[place])}</th>" for place in used)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(row[place])}</td>' for place in used)}</tr>" for row in rows[:SHOWN_TASKS]
    )
    more = f"<p>and {len(rows) - SHOWN_TASKS:,} more tasks</p>" if len(rows) > SHOWN_TASKS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
