"""The command that shows one run."""

from __future__ import annotations

import click

from launcher.cli.sections import SectionedCommand


@click.command(cls=SectionedCommand)
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: str, as_json: bool) -> int:
    """Show the tasks of a run: state, progress, CPU, memory.

    OWN TIME is what a step takes without waiting for other tasks; CPU is in cores (100 % is one). Of a run that has
    ended, shows how its tasks ended.
    """
    from launcher.commands.requests import find_run
    from launcher.commands.status import read_said, read_status, render_status

    files = find_run(run)
    found = read_status(files)
    click.echo(found.model_dump_json(indent=2) if as_json else "\n".join(render_status(found, read_said(files, 5))))
    return 0
