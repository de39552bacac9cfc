"""Options that several commands share, and a command whose arguments end in another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_DURATIONS = {
    "--start-timeout": ("start_s", "Seconds until the cluster must be up; 0: no limit.  [default: 600, or the spec's]"),
    "--stall-timeout": (
        "stall_s",
        "Seconds that the cluster may go without a step; 0: no limit.  [default: 20 steps, at least 120]",
    ),
    "--drain-timeout": (
        "drain_s",
        "Seconds that the others may go on after the first has succeeded; 0: no limit.  [default: 300, or the spec's]",
    ),
    "--stop-grace": (
        "stop_grace_s",
        "Seconds from SIGTERM to SIGKILL when you stop the run.  [default: 10, or the spec's]",
    ),
    "--lease": (
        "lease_s",
        "Seconds that a node goes on without a word from distlaunch.  [default: 60, or the spec's]",
    ),
}
"""The field of a spec's `timeouts:` that each option sets, and its help."""


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What can be said about any run."""
    for option in reversed(
        (
            click.option(
                "--run-dir",
                type=click.Path(path_type=Path),
                metavar="DIR",
                help="Folder for this run's logs and report; new or empty.  [default: in the state directory]",
            ),
            click.option("--dry-run", is_flag=True, help="Show what would be started, as `plan` does."),
            click.option("--verbose", "-v", is_flag=True, help="Show TensorFlow's start-up chatter, too."),
            click.option("--no-keras-patch", is_flag=True, help="Leave Keras 3 as it is."),
            click.option(
                "--max-restarts",
                type=click.IntRange(min=0),
                metavar="N",
                help="Start the whole cluster again after a failure, up to N times.  [default: 0, or the spec's]",
            ),
            *(
                click.option(option, field, type=click.FloatRange(min=0), metavar="S", help=text)
                for option, (field, text) in _DURATIONS.items()
            ),
            click.option("--tensorboard", is_flag=True, help="Run TensorBoard beside the tasks, on the chief's node."),
            click.option(
                "--keep-tensorboard", is_flag=True, help="The same, and let it stay after the training, until Ctrl-C."
            ),
            click.option(
                "--keep-own-tf-config", is_flag=True, help="Let the program set a TF_CONFIG other than the cluster's."
            ),
            click.option("--no-preload", is_flag=True, help="Let every task import TensorFlow by itself."),
            click.option("--no-progress", is_flag=True, help="Do not count the steps of `model.fit`."),
            click.option(
                "--chaos",
                multiple=True,
                metavar="FAULT",
                help="Do a fault on purpose, once: (kill|stop|exit|preempt):TASK@(epoch|step|seconds)=N, as in "
                "kill:worker:1@epoch=3; then start again. The last lines say whether training was resumed.",
            ),
        )
    ):
        command = option(command)
    return command


rehearsal_option = click.option(
    "--rehearsal",
    type=click.IntRange(min=1),
    metavar="N",
    help="On N containers of `distlaunch compose` in place of SPEC's machines: without their addresses, GPUs, Pythons "
    "and ways there.",
)


class ProgramCommand(click.Command):
    """A command whose arguments end in a program; remembers whether `--` came before it, which click would drop."""

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
