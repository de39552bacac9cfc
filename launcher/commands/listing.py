"""`distlaunch ls`: the rows of its table, and what changes between two looks."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from launcher.printable import printable
from launcher.run.naming import runs_directory
from launcher.run.selection import find_runs, list_runs, list_unended
from launcher.run.summary import RunSummary
from launcher.wording import count_of, render_age

COLUMNS = ("RUN", "STATE", "AGE", "TASKS", "PROGRESS", "RESTARTS")


def look(*, ended: bool) -> list[RunSummary]:
    """The runs that are running, queued or lost, the latest first; with `ended`, all."""
    return list_runs() if ended else list_unended()


def render_runs(runs: Sequence[RunSummary], now: float) -> list[str]:
    """A table."""
    return render_table([COLUMNS, *(_row(run, now) for run in runs)])


def render_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as they need to be."""
    # Not rich's tables: with 500 runs they take ten times as long as the rest of the command.
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(run: RunSummary, now: float) -> tuple[str, ...]:
    up = "?" if run.tasks_up is None else str(run.tasks_up)
    tasks = f"{up}/{run.tasks}" if run.tasks is not None else "-"
    return (
        printable(run.name),
        printable(run.shown_state),
        render_age(now - run.started),
        tasks,
        run.shown_step or "-",
        str(run.restarts),
    )


def _width(text: str) -> int:
    """Columns on a terminal."""
    return len(text) if text.isascii() else sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def changed(runs: Sequence[RunSummary], before: Mapping[str, RunSummary]) -> list[RunSummary]:
    """The runs that are new or have changed."""
    return [run for run in runs if before.get(run.directory) != run]


def describe_no_runs(environ: Mapping[str, str]) -> str:
    """A sentence for an empty table."""
    ended = sum(1 for _ in find_runs())
    if not ended:
        return f"There are no runs in {runs_directory(environ)}"
    return f"No run is running; `distlaunch ls -a` lists {count_of(ended, 'ended run')}"
