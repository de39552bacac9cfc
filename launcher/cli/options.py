"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.cli.changes import field_option, setting_option, variable_option
from launcher.cli.completion import complete_hosts, complete_running_runs, complete_runs
from launcher.cli.sections import option
from launcher.cli.values import Whole
from launcher.spec.field_options import FRAMEWORK, KEEP_WARM, MAX_RESTARTS, PYTHON, REPORT, TENSORBOARD, WAIT_GPUS

module_option = option("--module", "-m", section="Program", is_flag=True, help="Run a module, as `python -m` does.")

hosts_option = option(
    "-H",
    "--hosts",
    section="Cluster",
    multiple=True,
    metavar="HOST[:SLOTS],…",
    shell_complete=complete_hosts,
    help="Use these machines, with SLOTS (1) workers each.",
)
hostfile_option = option(
    "--hostfile",
    section="Cluster",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Use the machines in FILE, one per line.",
)

_HOST_OPTIONS = (
    hosts_option,
    hostfile_option,
    option(
        "--slurm",
        section="Cluster",
        is_flag=True,
        help="Use the nodes of the current Slurm job.",
    ),
    field_option(FRAMEWORK),
    setting_option,
    module_option,
    field_option(PYTHON),
)

_DETACH_OPTIONS = (
    option(
        "--detach",
        "-d",
        is_flag=True,
        help="Run in the background.",
    ),
    option("--wait", is_flag=True, help="As -d, but return only once the cluster is up."),
)

_RUN_OPTIONS = (
    variable_option,
    field_option(KEEP_WARM),
    field_option(MAX_RESTARTS),
    field_option(WAIT_GPUS),
    option(
        "--chaos",
        section="Program",
        multiple=True,
        metavar="FAULT",
        help="Inject a fault, like kill:worker:1@epoch=3.",
    ),
    option(
        "--run-dir",
        section="Output",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Write the run's files to DIR, a new folder.",
    ),
    field_option(REPORT),
    field_option(TENSORBOARD),
    option("--verbose", "-v", section="Output", is_flag=True, help="Show TensorFlow's messages and more details."),
    option("--no-live", section="Output", is_flag=True, help="Print plain lines, not the live view."),
    *_DETACH_OPTIONS,
    option("--dry-run", is_flag=True, help="Show the plan, and start nothing."),
)


def detach_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that let a run continue in the background."""
    for add in reversed(_DETACH_OPTIONS):
        command = add(command)
    return command


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of every run."""
    for add in reversed(_RUN_OPTIONS):
        command = add(command)
    return command


def host_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that name machines and a program in place of a spec."""
    for add in reversed(_HOST_OPTIONS):
        command = add(command)
    return command


run_argument = click.argument("run", required=False, shell_complete=complete_runs)
"""RUN; see `launcher.rundir.select`."""
running_run_argument = click.argument("run", required=False, shell_complete=complete_running_runs)
"""RUN of a command that needs a running run."""
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")

rehearsal_option = option(
    "--rehearsal",
    type=Whole(min=1),
    metavar="N",
    help="Use N containers of `distlaunch compose`.",
)
