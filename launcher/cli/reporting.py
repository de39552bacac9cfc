"""The command that makes one page of a run."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.options import run_argument
from launcher.cli.sections import SectionedCommand, option


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
