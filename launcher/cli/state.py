"""The command that shows one run."""

from __future__ import annotations

import click

from launcher.cli.options import json_option, run_argument
from launcher.cli.sections import SectionedCommand


@click.command(cls=SectionedCommand)
@run_argument
@json_option
def status(run: str | None, as_json: bool) -> int:
    """Show the tasks of a run: state, progress, CPU, memory.

    RUN is a run's name, a part of it, or its folder; left out: the only running run, else the latest one.

    OWN TIME is what a step takes without waiting for other tasks; CPU is in cores (100 % is one). Of a run that has
    ended, shows how its tasks ended.
    """
    from launcher.commands.status import read_said, read_status, render_status
    from launcher.run.selection import select_run

    files = select_run(run)
    found = read_status(files)
    click.echo(found.model_dump_json(indent=2) if as_json else "\n".join(render_status(found, read_said(files, 5))))
    return 0
