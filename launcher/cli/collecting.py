"""The command that brings the files of a run's nodes to its folder."""

from __future__ import annotations

import json

import click

from launcher.cli.options import json_option, run_argument
from launcher.cli.sections import SectionedCommand


@click.command(cls=SectionedCommand)
@run_argument
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@json_option
def collect(run: str | None, patterns: tuple[str, ...], as_json: bool) -> int:
    """Bring the files that tasks have written to the run's folder.

    RUN is a run's name, a part of it, or its folder; default: the only running run, else the latest one. Files that
    match a PATTERN, as in .gitignore, come from the working directory of each node; default: the patterns of `collect`
    in the spec. Only files that were changed since the run began are fetched, and none that is already here. A transfer
    that was interrupted continues.

    \b
    distlaunch collect
    distlaunch collect my-run 'models/' '*.csv'

    Exit status: 0 everything is here, 3 files of a node are missing.
    """
    from launcher.commands.collect import collect as collect_files
    from launcher.report.run_text import render_missing
    from launcher.rundir.select import select_run
    from launcher.spec.command_line import check_patterns
    from launcher.wording import count_of
    from worker_entry.protocol.units import render_size

    check_patterns(patterns)
    files = select_run(run)
    nodes = collect_files(files, patterns, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps([node.model_dump(mode="json") for node in nodes], indent=2))
    else:
        whole = [node for node in nodes if not node.problem]
        size = render_size(sum(node.bytes for node in whole))
        click.echo(f"{count_of(sum(node.files for node in whole), 'file')}, {size}, in {files.collected}")
        for line in render_missing(nodes):
            click.echo(line, err=True)
    return 3 if any(node.problem for node in nodes) else 0
