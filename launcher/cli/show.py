"""The commands that show runs: their list, the state of one, its end, and its page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.options import json_option, run_argument
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.watching import can_repaint, find_width, repaint, repeat

if TYPE_CHECKING:
    from launcher.rundir.directory import RunDir
    from launcher.rundir.summary import RunSummary

MESSAGES = 5
"""How many of the last messages are shown."""


@click.command(cls=SectionedCommand)
@option("--all", "-a", "everything", is_flag=True, help="Include runs that have ended.")
@option(
    "--watch", "-w", is_flag=True, help="Repaint every second until Ctrl-C; in a pipe, print each run that changes."
)
@option("--warm", is_flag=True, help="Print the nodes that keep TensorFlow warm, as JSON.")
@json_option
def ls(everything: bool, watch: bool, warm: bool, as_json: bool) -> int:
    """List runs: state, age, tasks, progress, restarts.

    Lists the runs that are running, queued or lost, the latest first. States: pending (in Slurm's queue), connecting,
    forming, running, restarting, waiting (for a lost node, or for GPUs), stopping, lost (its controller is gone;
    `distlaunch resume` continues it); with -a also succeeded, failed and its class, interrupted, and ended (its outcome
    is unknown).
    With -a, DURATION is the whole time of a run, and ENDED tells when.
    `on gpu-a`: its controller is on another machine. Lists the runs in the state directory, not those started with
    `--run-dir`. Below them, lists the nodes that keep TensorFlow warm, and the memory that it takes there.
    """
    from launcher.commands.listing import describe_no_runs, look, render_runs, render_warm
    from launcher.rundir.warm_nodes import find_warm_nodes

    if watch:
        _watch(everything=everything, as_json=as_json)
        return 0
    if warm:
        _print_json([asdict(node) for node in find_warm_nodes()])
        return 0
    runs = look(ended=everything)
    if as_json:
        _print_json([run.as_json() for run in runs])
        return 0
    room = find_width()
    click.echo("\n".join(render_runs(runs, time.time(), ended=everything, room=room)))
    if not runs:
        click.echo(describe_no_runs(os.environ), err=True)
    nodes = [*find_warm_nodes()]
    if nodes:
        click.echo("\n".join(["", *render_warm(nodes, time.time(), room)]))
    return 0


@click.command(cls=SectionedCommand)
@run_argument
@json_option
def wait(run: str | None, as_json: bool) -> int:
    """Wait until a run ends, and exit with its exit status.

    RUN is a run's name, a part of it, or its folder; default: the only running run, else the latest one.

    Exit status: that of the run; 3 if it is lost (its controller is gone), or if its outcome was not recorded.
    """
    from launcher.commands.waiting import find_exit_status, wait_for_end
    from launcher.printable import printable
    from launcher.rundir.select import select_run

    summary = wait_for_end(select_run(run, reads=True))
    if as_json:
        _print_json(summary.as_json())
    else:
        click.echo(printable(f"{summary.name}: {summary.shown_state}"))
    return find_exit_status(summary)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def _watch(*, everything: bool, as_json: bool) -> None:
    from launcher.commands.listing import look, render_runs

    if can_repaint() and not as_json:
        repaint(lambda room, _: render_runs(look(ended=everything), time.time(), ended=everything, room=room))
    else:
        _follow_runs(everything=everything, as_json=as_json)


def _follow_runs(*, everything: bool, as_json: bool) -> None:
    """Prints each run that is new or has changed, until the reader of stdout is gone."""
    from launcher.commands.listing import changed, look, render_runs

    before: dict[str, RunSummary] = {}

    def show() -> bool:
        runs = look(ended=everything)
        ended = [_look_again(run) for run in before.values() if run.directory not in {each.directory for each in runs}]
        news = changed([*runs, *(run for run in ended if run is not None)], before)
        if as_json:
            for run in news:
                click.echo(json.dumps(run.as_json()))
        elif news:
            lines = render_runs(news, time.time(), ended=everything, room=None)
            click.echo("\n".join(lines[1:] if before else lines))
        before.clear()
        before.update({run.directory: run for run in runs})
        return True

    repeat(show)


def _look_again(run: RunSummary) -> RunSummary | None:
    """The current summary of a run that was listed before; None if it was removed."""
    from pathlib import Path

    from launcher.errors import RunDirectoryError
    from launcher.rundir.directory import RunDir
    from launcher.rundir.summary import summarize

    try:
        return summarize(RunDir(Path(run.directory)))
    except RunDirectoryError:
        return None


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
    from launcher.commands.status import describe_lost, read_messages, read_status, render_status
    from launcher.rundir.select import select_run

    files = select_run(run, reads=True)
    if not watch:
        found = read_status(files)
        said = read_messages(files, MESSAGES)
        lines = [found.model_dump_json(indent=2)] if as_json else render_status(found, said, find_width())
        click.echo("\n".join(lines))
        if found.state == "lost":
            click.echo(describe_lost(files), err=True)
    elif can_repaint() and not as_json:
        repaint(_make_picture(files))
    else:
        _follow_status(files, as_json=as_json)
    return 0


def _make_picture(files: RunDir) -> Callable[[int, int], list[str]]:
    """A function that draws the live view, and the last messages below it."""
    from launcher.commands.status import read_messages, read_status, render_messages
    from launcher.console.live_view import LiveRegion, Seen, paint_plain
    from launcher.console.opening import has_colour
    from launcher.console.terminal import Size

    region = LiveRegion(colour=has_colour(), share=1.0)

    def render(columns: int, rows: int) -> list[str]:
        status = read_status(files)
        region.look = lambda: Seen(status)
        said = render_messages(status, read_messages(files, MESSAGES))[-max(rows - 3, 0) :]
        said = [paint_plain(line, columns) for line in said]
        return [*region.lines(Size(columns, rows - len(said) - 1), ()), "", *said]

    return render


def _follow_status(files: RunDir, *, as_json: bool) -> None:
    """Prints the status whenever a task or the state has changed, until the run has ended."""
    from launcher.commands.status import ENDED, read_messages, read_status, render_status

    last: list[object] = [None]

    def show() -> bool:
        found = read_status(files)
        news = found.model_copy(update={"now": 0.0})
        if news != last[0]:
            last[0] = news
            lines = [found.model_dump_json()] if as_json else render_status(found, read_messages(files, MESSAGES), None)
            click.echo("\n".join(lines))
        return found.state not in ENDED

    repeat(show)


@click.command(cls=SectionedCommand)
@run_argument
@option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    default_text="report.html in the run's folder",
    help="Write the page to FILE; `-` prints the page.",
)
@option("--open", "opens", is_flag=True, help="Open the page in a browser.")
def report(run: str | None, output: Path | None, opens: bool) -> int:
    """Write an HTML report of a run.

    RUN is a run's name, a part of it, or its folder; default: the only running run, else the latest one. The page has
    the verdict, a timeline, the curves of training and machines, and the messages. It is a single file that needs no
    network and can be sent to others. The report of a running run shows its current state.
    """
    from launcher.commands import page
    from launcher.errors import UsageError
    from launcher.rundir.select import select_run

    files = select_run(run, reads=output is not None)
    if output is not None and str(output) == "-":
        if opens:
            raise UsageError("--open needs a file, and -o - writes none", hint="remove one of them")
        click.echo(page.make(files), nl=False)
        return 0
    path = page.write(files, output)
    click.echo(str(path))
    if opens:
        page.show(path)
    return 0
