"""The command that examines machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.changes import field_option, read_changes
from launcher.cli.options import hostfile_option, hosts_option, json_option
from launcher.cli.sections import SectionedCommand
from launcher.spec.field_options import PYTHON

if TYPE_CHECKING:
    from launcher.cli.defaults import Defaults


@click.command(cls=SectionedCommand)
@hosts_option
@hostfile_option
@field_option(PYTHON)
@json_option
@click.pass_context
def doctor(context: click.Context, /, hosts: tuple[str, ...], hostfile: Path | None, as_json: bool) -> int:
    """Examine this machine, or others, and say what to do.

    Examines Python, TensorFlow, GPUs and drivers, SSH keys, the state folder, disks, ports, clocks, limits, and the
    features of the kernel that distlaunch uses. With -H, examines these machines, and whether each reaches the others.

    \b
    distlaunch doctor
    distlaunch doctor -H gpu-a,gpu-b

    Exit status: 0 no error found, 3 something keeps a cluster from running.
    """
    from launcher.commands.doctor import read_own_facts
    from launcher.controller import preview
    from launcher.report.doctor import make_report, render
    from launcher.spec import command_line

    program = command_line.make_program(["true"], is_module=False, is_command=True)
    named = command_line.read_hosts(hosts or (() if hostfile is not None else ("local",)), hostfile)
    spec = read_changes(context).apply(command_line.make_host_spec(*named, program), os.environ)
    defaults: Defaults = context.obj["defaults"]
    own = read_own_facts(defaults.path if defaults.lines else None)
    report = make_report(own, preview.check(spec, examines=True), (spec.ports.first, spec.ports.last))
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        click.echo("\n".join(render(report)))
    return 0 if report.ok else 3
