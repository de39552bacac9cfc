"""The command that shows one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from launcher.cli.options import json_option, run_argument
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.watching import can_repaint, find_width, repaint, repeat

if TYPE_CHECKING:
    from launcher.rundir.directory import RunDir

MESSAGES = 5
"""How many of the last messages are shown."""


@click.command(cls=SectionedCommand)
@run_argument
@option(
    "--watch", "-w", is_flag=True, help="Repaint every second until Ctrl-C; in a pipe, print again when it has changed."
)
@json_option
def status(run: str | None, watch: bool, as_json: bool) -> int:
    """Show the tasks of a run: state, progress, CPU, memory.

    RUN is a run's name, a part of it, or its folder; default: the only running run, else the latest one.

    OWN TIME is the time of a step without waiting for other tasks; CPU is in cores (100 % is one). For a run that has
    ended, shows how its tasks ended; for a lost one, how they were when its controller ended.
    """
    from launcher.commands.status import describe_lost, read_said, read_status, render_status
    from launcher.rundir.select import select_run

    files = select_run(run, reads=True)
    if not watch:
        found = read_status(files)
        said = read_said(files, MESSAGES)
        lines = [found.model_dump_json(indent=2)] if as_json else render_status(found, said, find_width())
        click.echo("\n".join(lines))
        if found.state == "lost":
            click.echo(describe_lost(files), err=True)
    elif can_repaint() and not as_json:
        repaint(_make_picture(files))
    else:
        _follow(files, as_json=as_json)
    return 0


def _make_picture(files: RunDir) -> Callable[[int, int], list[str]]:
    """A function that draws the live view, and the last messages below it."""
    from launcher.commands.status import read_said, read_status, render_said
    from launcher.console.live_view import LiveRegion, Seen, paint_plain
    from launcher.console.opening import has_colour
    from launcher.console.terminal import Size

    region = LiveRegion(colour=has_colour(), share=1.0)

    def render(columns: int, rows: int) -> list[str]:
        status = read_status(files)
        region.look = lambda: Seen(status)
        said = render_said(status, read_said(files, MESSAGES))[-max(rows - 3, 0) :]
        said = [paint_plain(line, columns) for line in said]
        return [*region.lines(Size(columns, rows - len(said) - 1), ()), "", *said]

    return render


def _follow(files: RunDir, *, as_json: bool) -> None:
    """Prints the status whenever a task or the state has changed, until the run has ended."""
    from launcher.commands.status import ENDED, read_said, read_status, render_status

    last: list[object] = [None]

    def show() -> bool:
        found = read_status(files)
        news = found.model_copy(update={"now": 0.0})
        if news != last[0]:
            last[0] = news
            lines = [found.model_dump_json()] if as_json else render_status(found, read_said(files, MESSAGES), None)
            click.echo("\n".join(lines))
        return found.state not in ENDED

    repeat(show)
