"""The commands that check or show a cluster, and start nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.completion import complete_specs
from launcher.cli.options import json_option, rehearsal_option
from launcher.cli.programs import SpecOrHosts, SpecOrProgramCommand, complete_first_spec, takes_spec_or_hosts
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.watching import find_width

if TYPE_CHECKING:
    from launcher.plan.launch_plan import LaunchPlan
    from launcher.spec.models import ClusterSpec


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

    Shows every mistake in the file with its line and the correction. Then checks each node: interpreter, versions,
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
            click.echo(f"{spec}: good; {where}")
            return 0
        tasks = len(list(cluster.placements()))
        nodes = len(cluster.nodes)
        from launcher.wording import count_of

        click.echo(f"{spec}: good, {count_of(tasks, 'task')} on {count_of(nodes, 'node')}")
        return 0
    cluster = find_nodes(cluster, rehearsal)
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
    return 0 if report.good else 3


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

    show_plan(plan_ahead(find_nodes(load_spec(spec, os.environ), rehearsal)), as_json=as_json)


def find_nodes(spec: ClusterSpec, rehearsal: int | None) -> ClusterSpec:
    """The spec with the nodes that its command names, or on containers."""
    from launcher.sources.node_list import ask_first, expect

    if rehearsal is None:
        return ask_first(spec)
    from launcher.spec.rehearsal import rehearse

    return rehearse(expect(spec), rehearsal)


def show_plan(launch_plan: LaunchPlan, *, as_json: bool) -> None:
    """Prints the plan."""
    from launcher.plan.rendering import render_json, render_text

    if as_json:
        click.echo(json.dumps(render_json(launch_plan), indent=2, ensure_ascii=False))
    else:
        click.echo(render_text(launch_plan))
