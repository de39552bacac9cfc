"""`distlaunch ls`: the rows of its tables, and the runs that are new or have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.printable import printable
from launcher.report.table import EMPTY, Column, render_table
from launcher.rundir.names import runs_directory
from launcher.rundir.select import find_runs, list_runs, list_unended
from launcher.rundir.summary import RunSummary
from launcher.rundir.warm_nodes import KnownWarmNode
from launcher.tasks import LOCAL
from launcher.wording import count_of, render_age, render_ago
from worker_entry.protocol.units import render_size

_RUN, _STATE = Column("RUN", 100, least=30), Column("STATE", 90, least=12)
_TASKS, _PROGRESS, _RESTARTS = Column("TASKS", 30), Column("PROGRESS", 60, least=8), Column("RESTARTS", 20)
COLUMNS = (_RUN, _STATE, Column("AGE", 80), _TASKS, _PROGRESS, _RESTARTS)
ALL_COLUMNS = (_RUN, _STATE, Column("DURATION", 40), Column("ENDED", 80), _TASKS, _PROGRESS, _RESTARTS)
"""With runs that have ended."""
WARM_COLUMNS = (Column("WARM NODE", 90), Column("MEMORY", 20), Column("ENDS IN", 60))


def look(*, ended: bool) -> list[RunSummary]:
    """The runs that are running, queued or lost, the latest first; with `ended`, all."""
    return list_runs() if ended else list_unended()


def render_runs(runs: Sequence[RunSummary], now: float, *, ended: bool, room: int | None) -> list[str]:
    """A table; with `ended`, it has the columns of runs that have ended. `room`: its width, None for no limit."""
    return render_table(ALL_COLUMNS if ended else COLUMNS, [_row(run, now, ended=ended) for run in runs], room)


def _row(run: RunSummary, now: float, *, ended: bool) -> tuple[str, ...]:
    up = "?" if run.tasks_up is None else str(run.tasks_up)
    tasks = f"{up}/{run.tasks}" if run.tasks is not None else EMPTY
    age = render_age((now if run.ended is None else run.ended) - run.started)
    end = EMPTY if run.ended is None else render_ago(run.ended, now)
    times = (age, end) if ended else (render_age(now - run.started),)
    return printable(run.name), printable(run.shown_state), *times, tasks, run.shown_step or EMPTY, str(run.restarts)


def render_warm(nodes: Sequence[KnownWarmNode], now: float, room: int | None) -> list[str]:
    """A table of the nodes on which agents wait; `room`: its width, None for no limit."""
    return render_table(WARM_COLUMNS, [_warm_row(node, now) for node in nodes], room)


def _warm_row(node: KnownWarmNode, now: float) -> tuple[str, ...]:
    name = "this machine" if node.node == LOCAL else printable(node.node)
    return name, render_size(node.bytes), render_age(node.until - now)


def changed(runs: Sequence[RunSummary], before: Mapping[str, RunSummary]) -> list[RunSummary]:
    """The runs that are new or have changed."""
    return [run for run in runs if before.get(run.directory) != run]


def describe_no_runs(environ: Mapping[str, str]) -> str:
    """A sentence for an empty table."""
    ended = sum(1 for _ in find_runs())
    if not ended:
        return f"There are no runs in {runs_directory(environ)}"
    return f"No run is running; `distlaunch ls -a` lists {count_of(ended, 'ended run')}"
