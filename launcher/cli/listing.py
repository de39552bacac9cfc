"""The commands that list runs, and wait for one."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from launcher.cli.options import json_option, run_argument
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.watching import can_repaint, find_width, repaint, repeat

if TYPE_CHECKING:
    from launcher.rundir.summary import RunSummary


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
    from launcher.commands.listing import describe_no_runs, look, render_runs
    from launcher.commands.warm import render_warm
    from launcher.controller.leftovers import find_warm_nodes

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
        _follow(everything=everything, as_json=as_json)


def _follow(*, everything: bool, as_json: bool) -> None:
    """Prints each run that is new or has changed, until nobody reads stdout."""
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
    """A run that was running; None if it was removed."""
    from pathlib import Path

    from launcher.errors import RunDirectoryError
    from launcher.rundir.directory import RunDir
    from launcher.rundir.summary import summarize

    try:
        return summarize(RunDir(Path(run.directory)))
    except RunDirectoryError:
        return None
