"""The commands that write files for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher.cli.completion import complete_specs
from launcher.cli.programs import ProgramCommand, SpecOrHosts, takes_spec_or_hosts
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.values import OneOf, Whole

STDOUT = "-"


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
    from launcher.sources.node_list import expect
    from launcher.spec.loading import load_spec
    from launcher.spec.writing import write_new

    here = current_directory()
    path = spec.resolve()
    cluster = expect(load_spec(spec))
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
    from launcher.report import run_events
    from launcher.report.doctor import DoctorReport
    from launcher.report.models import CheckReport, RunReport
    from launcher.spec.models import ClusterSpec

    models: dict[str, Any] = {"spec": ClusterSpec, "report": RunReport, "check": CheckReport, "doctor": DoctorReport}
    described = run_events.make_schema() if what == "events" else models[what].model_json_schema()
    click.echo(json.dumps(described, indent=2))
