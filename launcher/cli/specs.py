"""The commands about a spec that start nothing: they check it, show its plan, and write files for other programs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.changes import setting_option, variable_option
from launcher.cli.completion import complete_specs
from launcher.cli.options import json_option, rehearsal_option
from launcher.cli.programs import (
    ProgramCommand,
    SpecCommand,
    SpecOrHosts,
    SpecOrProgramCommand,
    complete_first_spec,
    load_changed,
    takes_spec_or_hosts,
)
from launcher.cli.sections import Group, SectionedCommand, option
from launcher.cli.values import OneOf, Whole
from launcher.cli.watching import find_width

if TYPE_CHECKING:
    from launcher.plan.launch_plan import LaunchPlan
    from launcher.spec.models import ClusterSpec

STDOUT = "-"
_KINDS = ("jobset", "job", "tfjob", "trainjob")


@click.command(cls=SpecOrProgramCommand)
@takes_spec_or_hosts
@json_option
@option("--spec-only", is_flag=True, help="Check only the file; connect to no machine.")
@option("--speed", is_flag=True, help="Also measure nodes and links; report any below 0.75 × the median.")
@rehearsal_option
@click.argument(
    "program",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SPEC | (-H HOSTS | --slurm) [SCRIPT] [ARGS]…",
    shell_complete=complete_first_spec,
)
def check(
    given: SpecOrHosts,
    /,
    as_json: bool,
    spec_only: bool,
    speed: bool,
    rehearsal: int | None,
) -> int:
    """Check a spec, or hosts, without starting anything.

    Shows every error in the file with its line and the correction. Then checks each node: interpreter, versions,
    GPUs, disk, clock, program. Each node also connects to the address of every task, including its own tasks. `up`
    does the same before it starts the cluster.

    With --speed, each node then multiplies matrices and copies memory, and measures its link in a ring of all nodes. A
    slow node or link is a warning.

    Exit status: 0 no error found, 2 the spec is wrong, 3 a node cannot run its tasks.
    """
    cluster = given.load()
    if spec_only:
        spec = "the command line" if given.names_hosts else given.program[0]
        if not cluster.nodes:
            where = (
                "its nodes come from a Slurm job"
                if cluster.source == "slurm"
                else "the command that names its nodes was not run"
            )
            click.echo(f"{spec}: ok; {where}")
            return 0
        tasks = len(list(cluster.placements()))
        nodes = len(cluster.nodes)
        from launcher.wording import count_of

        click.echo(f"{spec}: ok, {count_of(tasks, 'task')} on {count_of(nodes, 'node')}")
        return 0
    cluster = choose_nodes(cluster, rehearsal)
    from launcher.controller import preview
    from launcher.report.check_text import COLUMNS, make_rows, make_speed_tables, render_findings

    report = preview.check(cluster.changed(check_speed=True) if speed else cluster)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        from launcher.report.table import render_table

        room = find_width()
        click.echo("\n".join(render_table(COLUMNS, make_rows(report), room)))
        for columns, rows in make_speed_tables(report.speed) if report.speed is not None else ():
            click.echo("\n".join(["", *render_table(columns, rows, room)]))
        click.echo("\n".join(render_findings(report)))
    return 0 if report.ok else 3


@click.command(cls=SectionedCommand)
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@json_option
@rehearsal_option
def plan(spec: Path, as_json: bool, rehearsal: int | None) -> None:
    """Show the launch plan of a spec.

    Shows the node, address, port, TF_CONFIG and environment of each task, and the command that runs the task by hand.
    Hides secrets.
    """
    from launcher.controller.preview import plan_ahead
    from launcher.spec.loading import load_spec

    show_plan(plan_ahead(choose_nodes(load_spec(spec, os.environ), rehearsal)), as_json=as_json)


def choose_nodes(spec: ClusterSpec, rehearsal: int | None) -> ClusterSpec:
    """The spec with the nodes that its source names; for a rehearsal, with containers instead of nodes."""
    from launcher.sources.node_list import find_nodes_first, preview_nodes

    if rehearsal is None:
        return find_nodes_first(spec)
    from launcher.spec.rehearsal import rehearse

    return rehearse(preview_nodes(spec), rehearsal)


def show_plan(launch_plan: LaunchPlan, *, as_json: bool) -> None:
    """Prints the plan."""
    from launcher.plan.rendering import render_json, render_text

    if as_json:
        click.echo(json.dumps(render_json(launch_plan), indent=2, ensure_ascii=False))
    else:
        click.echo(render_text(launch_plan))


@click.command(cls=ProgramCommand)
@takes_spec_or_hosts
@option(
    "--output",
    "-o",
    type=click.Path(),
    metavar="FILE",
    default="cluster.yaml",
    default_text="cluster.yaml",
    help="Write FILE; `-` prints the spec.",
)
@option("--force", is_flag=True, help="Overwrite FILE.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT | -m MODULE | -- COMMAND] [ARGS]…")
def init(
    given: SpecOrHosts,
    /,
    output: str,
    force: bool,
) -> None:
    """Write a commented spec, for hosts or for this machine.

    `up` runs the same spec if it gets the same arguments. Without hosts, the spec has two workers on this machine.

    \b
    distlaunch init                            for the built-in demo
    distlaunch init -H gpu-a:2,gpu-b train.py  for a script on two machines
    """
    from launcher.spec.writing import render_commented, write_new

    spec = given.make_host_spec(given.hosts if given.names_hosts else ("local:2",))
    if output == STDOUT:
        click.echo(render_commented(spec), nl=False)
        return
    write_new(Path(output), render_commented(spec, output), force=force)
    click.echo(f"Wrote {output}; `distlaunch check {output}` checks it", err=True)


@click.command(cls=SectionedCommand)
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@option(
    "--nodes",
    "-n",
    type=Whole(min=1, max=64),
    metavar="N",
    default_text="one per node of SPEC",
    help="Write N (1 to 64) containers: SPEC's first nodes, or more like its last.",
)
@option(
    "--output",
    "-o",
    type=click.Path(),
    metavar="FILE",
    default=STDOUT,
    default_text="stdout",
    help="Write FILE.",
)
@option("--force", is_flag=True, help="Overwrite FILE.")
def compose(spec: Path, nodes: int | None, output: str, force: bool) -> None:
    """Write a Compose file to rehearse a spec in containers.

    \b
    distlaunch compose two_nodes.yaml -o compose.yaml
    docker compose run --rm controller
    docker compose down --volumes

    Run these commands in the folder that has the program and the spec: every container mounts that folder as /project.
    The first lines of the Compose file say how to build the image from docker/Dockerfile.
    """
    from launcher.errors import UsageError
    from launcher.plan.compose import render_compose
    from launcher.rundir.names import current_directory
    from launcher.sources.node_list import preview_nodes
    from launcher.spec.loading import load_spec
    from launcher.spec.writing import write_new

    here = current_directory()
    path = spec.resolve()
    cluster = preview_nodes(load_spec(spec))
    if not path.is_relative_to(here):
        raise UsageError(
            f"{spec} is not below {here}, the only folder that containers see", hint="change to its folder"
        )
    text = render_compose(cluster, str(path.relative_to(here)), nodes or len(cluster.nodes))
    if output == STDOUT:
        click.echo(text, nl=False)
        return
    write_new(Path(output), text, force=force)
    click.echo(f"Wrote {output}; `docker compose run --rm controller` runs it", err=True)


@click.command(cls=SectionedCommand)
@click.argument("what", type=OneOf(["spec", "report", "check", "doctor", "events"]), default="spec")
def schema(what: str) -> None:
    """Print a JSON Schema, for editors and programs.

    Describes specs (the default), report.json, the output of `check --json` or `doctor --json`, or a line of
    events.jsonl.
    """
    from launcher.described import DIALECT, find_schema_url
    from launcher.report import run_events
    from launcher.report.doctor import DoctorReport
    from launcher.report.models import CheckReport, RunReport
    from launcher.spec.models import ClusterSpec

    models: dict[str, Any] = {"spec": ClusterSpec, "report": RunReport, "check": CheckReport, "doctor": DoctorReport}
    described = run_events.make_schema() if what == "events" else models[what].model_json_schema()
    click.echo(json.dumps({"$schema": DIALECT, "$id": find_schema_url(what), **described}, indent=2))


@click.group(cls=Group)
def export() -> None:
    """Write manifests that run a spec without distlaunch."""


def _parse_volumes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Parses `CLAIM:PATH` texts."""
    volumes = {}
    for text in texts:
        claim, colon, path = text.partition(":")
        if not colon or not path.startswith("/") or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", claim):
            raise click.BadParameter(f"expected CLAIM:PATH like checkpoints:/checkpoints, not {text}")
        volumes[claim] = path
    return volumes


@export.command(cls=SpecCommand)
@option(
    "--as",
    "kind",
    type=OneOf(_KINDS),
    default="jobset",
    default_text="jobset",
    help="Write a JobSet, an Indexed Job, a TFJob, or a TrainJob with its runtime.",
)
@option("--image", metavar="IMAGE", help="Use this container image.")
@option(
    "--volume",
    "volumes",
    metavar="CLAIM:PATH",
    multiple=True,
    callback=_parse_volumes,
    help="Mount a persistent volume claim in all pods; repeatable.",
)
@option(
    "--output", "-o", type=click.Path(), metavar="FILE", default=STDOUT, default_text="stdout", help="Write a new FILE."
)
@setting_option
@variable_option
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGS]…")
@click.pass_context
def kubernetes(
    context: click.Context,
    /,
    spec: Path,
    arguments: tuple[str, ...],
    kind: str,
    image: str | None,
    volumes: dict[str, str],
    output: str,
) -> None:
    """Write manifests for `kubectl apply` that run a spec.

    \b
    distlaunch export kubernetes cluster.yaml | kubectl apply --server-side -f -
    distlaunch export kubernetes two_nodes.yaml --image registry/train:1

    SPEC has `nodes: {from: kubernetes, …}`; with --image, each task of any spec gets a pod. ARGS are appended to the
    arguments of its program. Keras is patched, steps are counted, and `kubectl describe` shows why a task failed.
    Rejects fields that no manifest can express.
    """
    from launcher.commands.export import read_export
    from launcher.kubernetes.export import render_export
    from launcher.kubernetes.exported import KINDS
    from launcher.spec.writing import write_new

    cluster = load_changed(context, spec, arguments, check=False)
    chosen = next(known for known in KINDS if known == kind)
    text = render_export(read_export(cluster, chosen, image, volumes))
    if output == STDOUT:
        click.echo(text, nl=False)
        return
    write_new(Path(output), text, force=False)
