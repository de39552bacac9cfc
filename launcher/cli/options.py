"""Options that several commands share, and a command whose arguments end in another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launcher.cli.completion import complete_running_runs, complete_runs
from launcher.cli.sections import SectionedCommand, SectionedOption

_DURATIONS = {
    "--start-timeout": ("start_s", "Fail if the cluster is not up after S seconds; 0: no limit.", "600"),
    "--stall-timeout": (
        "stall_s",
        "Fail if the cluster makes no step for S seconds; 0: no limit.",
        "20 steps, at least 120",
    ),
    "--drain-timeout": (
        "drain_s",
        "Fail if the others do not end within S seconds of the first; 0: no limit.",
        "300",
    ),
    "--stop-grace": ("stop_grace_s", "Wait S seconds from SIGTERM to SIGKILL when you stop the run.", "10"),
    "--lease": ("lease_s", "Stop a node's tasks after S seconds without contact to the controller.", "60"),
}
"""The field of a spec's `timeouts:` that each option sets, its help, and the default."""


def option(*names: str, **settings: Any) -> Callable[..., Any]:
    """`click.option` with a `section` of the help, and a `default_text` for what is not the same in all cases."""
    return click.option(*names, cls=SectionedOption, **settings)


_RUN_OPTIONS = (
    option("--no-keras-patch", section="Program", is_flag=True, help="Do not patch Keras 3."),
    option(
        "--no-preload",
        section="Program",
        is_flag=True,
        help="Import TensorFlow in every task, not once per node.",
    ),
    option("--no-progress", section="Program", is_flag=True, help="Do not count the steps of `model.fit`."),
    option(
        "--keep-own-tf-config",
        section="Program",
        is_flag=True,
        help="Allow the program to replace the cluster's TF_CONFIG.",
    ),
    option(
        "--max-restarts",
        section="Restarts",
        type=click.IntRange(min=0),
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
            type=click.FloatRange(min=0),
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
    option("--verbose", "-v", section="Output", is_flag=True, help="Show TensorFlow's start-up messages too."),
    option("--tensorboard", section="Output", is_flag=True, help="Run TensorBoard on the chief's node during the run."),
    option(
        "--keep-tensorboard",
        section="Output",
        is_flag=True,
        help="Run TensorBoard during the run and after it, until Ctrl-C.",
    ),
    option("--detach", "-d", is_flag=True, help="Return once the cluster is up; the run continues in the background."),
    option("--dry-run", is_flag=True, help="Show the plan and start nothing."),
)


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of every run."""
    for add in reversed(_RUN_OPTIONS):
        command = add(command)
    return command


run_argument = click.argument("run", required=False, shell_complete=complete_runs)
"""RUN; see `launcher.run.selection`."""
running_run_argument = click.argument("run", required=False, shell_complete=complete_running_runs)
"""The same for a command that is for running runs."""
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")

rehearsal_option = option(
    "--rehearsal",
    type=click.IntRange(min=1),
    metavar="N",
    help="Use N containers of `distlaunch compose` instead of SPEC's machines, without the machines' addresses, GPUs, "
    "Pythons and SSH settings.",
)


class ProgramCommand(SectionedCommand):
    """A command whose arguments end in a program; it remembers a `--` before the program, which click drops."""

    _MARK = "\0command"

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            position = args.index("--") + 1
            args = [*args[:position], self._MARK, *args[position:]]
        rest = super().parse_args(context, args)
        program: tuple[str, ...] = context.params["program"]
        context.meta["distlaunch.is_command"] = program[:1] == (self._MARK,)
        # Behind a script, `--` is one of the script's arguments.
        context.params["program"] = tuple(word for word in program if word != self._MARK)
        return rest
