"""The commands that remove the folders of runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import click

from launcher.cli.completion import complete_ended_runs
from launcher.cli.options import json_option
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.values import Duration, Whole


@click.command(cls=SectionedCommand)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, shell_complete=complete_ended_runs)
@json_option
def rm(runs: tuple[str, ...], as_json: bool) -> int:
    """Remove the folders of runs that have ended.

    RUN is a run's name, a part of it, or its folder. Removes logs, report and checkpoints without confirmation.
    Removes nothing if one of the runs is running, may be running on another machine, or belongs to another user. Files
    that tasks wrote on other machines stay there.

    Exit status: 0 removed, 2 one of the runs must not be removed, 3 a folder could not be removed.
    """
    from launcher.commands.removal import find_removable

    _remove((files.root for files in find_removable(runs)), dry_run=False, as_json=as_json)
    return 0


@click.command(cls=SectionedCommand)
@option("--older-than", type=Duration(), metavar="AGE", help="Remove runs that ended at least AGE ago: 30d, 12h, 10m.")
@option("--keep", type=Whole(min=0), metavar="N", help="Keep the latest N of the runs that have ended.")
@option("--dry-run", is_flag=True, help="Show what would be removed without removing anything.")
@json_option
def prune(older_than: float | None, keep: int | None, dry_run: bool, as_json: bool) -> int:
    """Remove the folders of old runs.

    Removes logs, reports and checkpoints without confirmation. Without options, uses `--older-than 30d --keep 20`.
    With both options, removes a run only if it is that old and not among the latest N.

    Never removes a run that is running or may be running: on another machine, or lost with an unexpired lease. Removes
    only your own runs in the state directory, not those started with `--run-dir`; follows no links.

    Exit status: 0 removed, 3 a folder could not be removed.
    """
    from launcher.commands.removal import KEEP, OLDER_THAN_S, find_prunable

    if older_than is None and keep is None:
        older_than, keep = OLDER_THAN_S, KEEP
    found = find_prunable(os.environ, keep=keep or 0, older_than_s=older_than or 0.0)
    _remove(found, dry_run=dry_run, as_json=as_json)
    return 0


def _remove(folders: Iterable[Path], *, dry_run: bool, as_json: bool) -> None:
    """Removes the folders, as many as possible.

    Raises:
        RunDirectoryError: one of them cannot be removed.
    """
    from dataclasses import asdict

    from launcher.commands.removal import measure, remove
    from launcher.errors import DistlaunchError
    from launcher.printable import printable
    from launcher.wording import count_of

    done = []
    failed: DistlaunchError | None = None
    for folder in folders:
        removal = measure(folder)
        try:
            if not dry_run:
                remove(folder)
        except DistlaunchError as error:
            failed = failed or error
            continue
        done.append(removal)
        if not as_json:
            verb = "Would remove" if dry_run else "Removed"
            click.echo(printable(f"{verb} {removal.name}: {count_of(removal.bytes, 'byte')}"))
    if as_json:
        click.echo(json.dumps([asdict(removal) for removal in done], indent=2))
    elif not done and failed is None:
        click.echo("Nothing to remove")
    elif len(done) > 1:
        total = f"{count_of(len(done), 'run')}, {count_of(sum(removal.bytes for removal in done), 'byte')}"
        click.echo(f"{'Would free' if dry_run else 'Freed'}: {total}")
    if failed is not None:
        raise failed
