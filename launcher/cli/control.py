"""The commands that act on a run that is running or has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import click

from launcher.cli.completion import complete_ended_runs, complete_runs_or_specs
from launcher.cli.options import json_option, run_argument, running_run_argument
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.values import Duration, Number, Whole


@click.command(cls=SectionedCommand)
@click.argument("what", metavar="RUN|SPEC", shell_complete=complete_runs_or_specs)
@json_option
def clean(what: str, as_json: bool) -> int:
    """Stop leftover processes of a run whose controller is gone.

    RUN is a run's name, a part of it, or its folder. With SPEC, cleans the spec's nodes of all ended runs that were
    started from this machine. Stops only processes that provably belong to those runs. An agent without a controller
    stops by itself after `timeouts.lease_s`; `clean` does not wait for that.

    Exit status: 0 nothing is left, 2 the run is still running, or may be on another machine, 3 a node could not be
    reached or cleaned.
    """
    from launcher.commands.clean import clean
    from launcher.printable import printable

    ok = True
    for node in clean(what):
        click.echo(json.dumps(asdict(node)) if as_json else printable(str(node)))
        ok = ok and node.ok
    return 0 if ok else 3


@click.command(cls=SectionedCommand)
@running_run_argument
@option("--now", is_flag=True, help="Kill the tasks immediately, without a grace period.")
@option("--all", "everything", is_flag=True, help="Stop all running runs.")
@option("--warm", is_flag=True, help="Stop the processes that keep TensorFlow warm on the nodes; stop no run.")
@json_option
def down(run: str | None, now: bool, everything: bool, warm: bool, as_json: bool) -> int:
    """Stop a run and wait until all its processes are gone.

    RUN is a running run's name, a part of it, or its folder; default: the only running run. Stops the run as Ctrl-C in
    its terminal does. Works only on the machine, and in the container, of the run's controller.

    Exit status: 0 the run has ended, 2 its controller is on another machine, 3 it has not ended in time, or a warm node
    could not be reached.
    """
    from launcher.commands.requests import ask_to_end
    from launcher.errors import UsageError
    from launcher.in_parallel import map_parallel
    from launcher.rundir.directory import RunDir
    from launcher.rundir.names import name_run
    from launcher.rundir.select import list_running, select_run, verify_own

    if (run is not None) + everything + warm > 1:
        raise UsageError("RUN, --all and --warm cannot be combined", hint="use one of them")
    if warm:
        return _end_warm(as_json=as_json)
    if everything:
        found = [verify_own(RunDir(Path(each.directory))) for each in list_running()]
    else:
        found = [select_run(run, running=True)]
    for files, ended in zip(found, map_parallel(lambda each: ask_to_end(each, now=now), found, 32), strict=True):
        text = f"{'Stopped' if ended else 'Already ended'}: {name_run(files.root)}"
        click.echo(json.dumps({"directory": str(files.root), "stopped": ended}) if as_json else text)
    if not found:
        click.echo("No run is running", err=True)
    return 0


def _end_warm(*, as_json: bool) -> int:
    from launcher.commands.warm import end_all
    from launcher.printable import printable

    nodes = [*end_all()]
    for node in nodes:
        click.echo(json.dumps(asdict(node)) if as_json else printable(str(node)))
    if not nodes:
        click.echo("Nothing is kept warm", err=True)
    return 0 if all(node.ok for node in nodes) else 3


@click.command(cls=SectionedCommand)
@running_run_argument
@json_option
def stacks(run: str | None, as_json: bool) -> int:
    """Show the Python stacks of all tasks of a run.

    RUN is a running run's name, a part of it, or its folder; default: the only running run. Groups equal stacks
    without stopping the tasks. SIGUSR1 to the run's controller prints the same stacks in the controller's terminal.
    """
    from launcher.commands.requests import ask_stacks
    from launcher.rundir.select import select_run

    text = ask_stacks(select_run(run, running=True))
    click.echo(json.dumps({"stacks": text}) if as_json else text, nl=as_json)
    return 0


@click.command(cls=SectionedCommand)
@running_run_argument
@option(
    "--duration",
    type=Number(min=0.1, max=600),
    default=3.0,
    show_default=True,
    metavar="S",
    help="Profile for S seconds.",
)
@json_option
def profile(run: str | None, duration: float, as_json: bool) -> int:
    """Profile all tasks of a run for TensorBoard.

    RUN is a running run's name, a part of it, or its folder; default: the only running run. Training continues.
    Writes to the run's log directory, where TensorBoard with `tensorboard-plugin-profile` finds the profiles: Python
    functions and GPU work of every task, and TensorFlow operations of the first worker, or of all tasks under
    parameter_server.
    """
    from launcher.commands.profile import profile
    from launcher.rundir.select import select_run

    capture = profile(select_run(run, running=True), duration)
    if as_json:
        click.echo(json.dumps({"files": [str(path) for path in capture.files], "silent": capture.silent}))
        return 0
    for path in capture.files:
        click.echo(str(path))
    if capture.silent:
        click.echo(f"Warning: {', '.join(capture.silent)} recorded nothing; try a longer --duration", err=True)
    return 0


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
