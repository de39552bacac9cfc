"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.cli.completion import complete_hosts, complete_running_runs, complete_runs, complete_settings
from launcher.cli.sections import SectionedOption
from launcher.cli.values import Duration, Number, Whole

_DURATIONS = {
    "--start-timeout": ("start_s", "Fail if the cluster is not up after S seconds; 0: no limit.", "600"),
    "--stall-timeout": (
        "stall_s",
        "Fail if the cluster completes no step for S seconds; 0: no limit.",
        "20 steps, at least 120",
    ),
    "--drain-timeout": (
        "drain_s",
        "Fail if the other tasks do not end within S seconds of the first; 0: no limit.",
        "300",
    ),
    "--stop-grace": ("stop_grace_s", "Give tasks S seconds to end when you stop the run.", "10"),
    "--lease": ("lease_s", "Stop a node's tasks after S seconds without contact with the controller.", "60"),
}
"""The field of a spec's `timeouts:` that each option sets, its help, and the default."""


def option(*names: str, **settings: Any) -> Callable[..., Any]:
    """`click.option` with a `section` of the help, and a `default_text` for a default that can vary."""
    return click.option(*names, cls=SectionedOption, **settings)


_SETTING = option(
    "--set",
    "settings",
    section="Cluster",
    multiple=True,
    metavar="FIELD=VALUE",
    shell_complete=complete_settings,
    help="Set any field of the spec, like restart.max_restarts=3 or nodes[0].python=/opt/python; VALUE is YAML; "
    "repeatable.",
)

_VARIABLE = option(
    "-e",
    "--env",
    "variables",
    section="Program",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set an environment variable of all tasks; NAME alone copies it from this environment; repeatable.",
)

_MODULE = option("--module", "-m", section="Program", is_flag=True, help="Run a Python module, as `python -m` does.")

_PYTHON = option(
    "--python",
    section="Program",
    metavar="PATH",
    default_text="the one that runs distlaunch, or where it is missing python3",
    help="Use this Python interpreter on all nodes whose spec names none.",
)

_HOST_OPTIONS = (
    option(
        "-H",
        "--hosts",
        section="Cluster",
        multiple=True,
        metavar="HOST[:SLOTS],…",
        shell_complete=complete_hosts,
        help="Use these machines, with SLOTS (1) workers on each, instead of a spec; repeatable.",
    ),
    option(
        "--hostfile",
        section="Cluster",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Use the machines in FILE, one per line, like `gpu-a`, `gpu-a:2` or `gpu-a slots=2`.",
    ),
    option(
        "--slurm",
        section="Cluster",
        is_flag=True,
        help="Use the nodes of the current Slurm job, with one worker per Slurm task.",
    ),
    _SETTING,
    _MODULE,
    _PYTHON,
)

_DETACH_OPTIONS = (
    option(
        "--detach",
        "-d",
        is_flag=True,
        help="Run in the background; return once the cluster is up, or its tasks import no TensorFlow, at the latest "
        "10 s after their start.",
    ),
    option("--wait", is_flag=True, help="Run in the background, and return once the cluster is up."),
)

_RUN_OPTIONS = (
    _VARIABLE,
    option(
        "--isolate",
        section="Program",
        is_flag=True,
        help="Give the tasks on one machine a private network without access from or to the outside.",
    ),
    option("--no-keras-patch", section="Program", is_flag=True, help="Do not patch Keras 3."),
    option(
        "--no-preload",
        section="Program",
        is_flag=True,
        help="Import TensorFlow in every task, not once per node.",
    ),
    option(
        "--keep-warm",
        "keep_warm_s",
        section="Program",
        type=Duration(),
        metavar="AGE",
        help="Keep TensorFlow imported on the nodes for AGE, like 15m, after the run, to start the next run faster.",
    ),
    option(
        "--sample-every",
        "sample_every_s",
        section="Output",
        type=Number(min=0),
        metavar="S",
        default_text="2",
        help="Sample the resource usage of tasks every S seconds; 0: never.",
    ),
    option(
        "--metrics",
        section="Output",
        metavar="[ADDRESS:]PORT",
        help="Serve metrics for Prometheus; ADDRESS defaults to 127.0.0.1.",
    ),
    option(
        "--metrics-file",
        section="Output",
        type=click.Path(dir_okay=False),
        metavar="FILE",
        help="Write metrics to FILE every few seconds, for node_exporter.",
    ),
    option("--no-progress", section="Program", is_flag=True, help="Do not count the steps of `model.fit`."),
    option(
        "--keep-own-tf-config",
        section="Program",
        is_flag=True,
        help="Let TensorFlow use the TF_CONFIG that the program sets.",
    ),
    option(
        "--max-restarts",
        section="Restarts",
        type=Whole(min=0),
        metavar="N",
        default_text="0",
        help="Restart the whole cluster after a failure, up to N times.",
    ),
    option(
        "--chaos",
        section="Restarts",
        multiple=True,
        metavar="FAULT",
        help="Inject FAULT once, restart, and report whether training resumed. FAULT is "
        "(kill|stop|exit|preempt):TASK@(epoch|step|seconds)=N, as in kill:worker:1@epoch=3; repeatable.",
    ),
    *(
        option(
            name,
            field,
            section="Time limits",
            type=Number(min=0),
            metavar="S",
            default_text=default,
            help=text,
        )
        for name, (field, text, default) in _DURATIONS.items()
    ),
    option(
        "--run-dir",
        section="Output",
        type=click.Path(path_type=Path),
        metavar="DIR",
        default_text="in the state directory",
        help="Write logs and the report to DIR, a new or empty folder.",
    ),
    option("--report", section="Output", is_flag=True, help="Write report.html to the run's folder when the run ends."),
    option(
        "--verbose",
        "-v",
        section="Output",
        is_flag=True,
        help="Show TensorFlow's start-up messages, and details of starts.",
    ),
    option("--no-live", section="Output", is_flag=True, help="Print plain lines instead of the live view."),
    option("--tensorboard", section="Output", is_flag=True, help="Run TensorBoard on the chief's node during the run."),
    option(
        "--keep-tensorboard",
        section="Output",
        is_flag=True,
        help="Run TensorBoard during the run and after it, until Ctrl-C.",
    ),
    *_DETACH_OPTIONS,
    option("--dry-run", is_flag=True, help="Show the plan without starting anything."),
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


setting_option, module_option, variable_option, python_option = _SETTING, _MODULE, _VARIABLE, _PYTHON

run_argument = click.argument("run", required=False, shell_complete=complete_runs)
"""RUN; see `launcher.run.selection`."""
running_run_argument = click.argument("run", required=False, shell_complete=complete_running_runs)
"""RUN of a command that needs a running run."""
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")

rehearsal_option = option(
    "--rehearsal",
    type=Whole(min=1),
    metavar="N",
    help="Use N containers of `distlaunch compose` instead of SPEC's machines, without the machines' addresses, GPUs, "
    "Pythons and SSH settings.",
)
