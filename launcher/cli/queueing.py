"""The command that queues a run."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.changes import setting_option, variable_option
from launcher.cli.completion import complete_specs
from launcher.cli.options import json_option
from launcher.cli.programs import SpecCommand, load_changed
from launcher.cli.sections import option

if TYPE_CHECKING:
    from launcher.commands.submit_controller import SubmittedController


@click.command(cls=SpecCommand)
@setting_option
@variable_option
@option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Write the run's files to this new folder.")
@option("--no-check", is_flag=True, help="Start without checking the nodes.")
@option("--dry-run", is_flag=True, help="Print the job's script or manifests without queueing it.")
@json_option
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGS]…")
@click.pass_context
def submit(
    context: click.Context,
    /,
    spec: Path,
    arguments: tuple[str, ...],
    run_dir: Path | None,
    no_check: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Queue a Slurm or Kubernetes job that runs a spec.

    SPEC has `nodes: slurm`, and the job's resources under `slurm:`; ARGS are appended to the arguments of its program.
    The run continues in the same folder when Slurm requeues the job; with `restart:`, the job requeues itself after a
    preemption and at its time limit. `ls`, `status`, `logs -f` and `down` work as soon as the job is queued.

    With `nodes: {from: kubernetes, …}`, distlaunch runs in a pod, with only the rights that it needs.
    """
    from launcher.commands import submit as submission
    from launcher.commands import submit_controller
    from launcher.errors import UsageError
    from launcher.spec.pods import PodsSpec

    cluster = load_changed(context, spec, arguments)
    if isinstance(cluster.source, PodsSpec):
        if run_dir is not None:
            raise UsageError("the run's files are in its controller's pod", hint="remove --run-dir")
        prepared = submit_controller.prepare(cluster, os.environ, checks=not no_check)
        if dry_run:
            click.echo(submit_controller.render(prepared), nl=False)
            return
        _tell_controller(submit_controller.submit(prepared), as_json=as_json)
        return
    submission.check_fits(cluster)
    if dry_run:
        click.echo(submission.render(cluster, run_dir), nl=False)
        return
    submitted = submission.submit(cluster, run_dir, checks=not no_check)
    from launcher.rundir.names import name_run

    name = name_run(submitted.directory)
    if as_json:
        click.echo(json.dumps({"job": submitted.job, "run": name, "directory": str(submitted.directory)}))
        return
    click.echo(submitted.job)
    click.echo(f"Queued job {submitted.job}: run {name}", err=True)
    for verb, what in (("status", "show its state"), ("logs -f", "follow its output"), ("down", "cancel it")):
        click.echo(f"  distlaunch {verb} {name:<{len(name) + 8 - len(verb)}}  {what}", err=True)


def _tell_controller(submitted: SubmittedController, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"job": submitted.job}))
        return
    click.echo(submitted.job)
    click.echo(f"Created job {submitted.job}", err=True)
    kubectl = shlex.join(submitted.kubectl.words)
    for verb, what in (("logs --follow", "follow its output"), ("delete", "stop the run and remove its pods")):
        click.echo(f"  {kubectl} {verb} job/{submitted.job}  {what}", err=True)
