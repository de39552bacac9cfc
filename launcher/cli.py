"""The command line; the one place where errors become exit statuses.

Nothing but click is imported until a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from launcher.plan import LaunchPlan
    from launcher.spec import ClusterSpec

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main() -> NoReturn:
    """The `distlaunch` command."""
    sys.exit(_main(sys.argv[1:]))


def _main(arguments: list[str]) -> int:
    debug = "--debug" in arguments
    try:
        status = cli.main(arguments, prog_name="distlaunch", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        return 130
    except BrokenPipeError:  # `distlaunch plan … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from launcher.errors import EXIT_BUG, DistlaunchError, error_lines

        if debug:
            raise
        if isinstance(error, DistlaunchError):
            click.echo("\n".join(error_lines(error.message, error.reference, error.evidence, error.cure)), err=True)
            return error.exit_status
        click.echo(f"Error: a bug in distlaunch: {error!r}; run again with --debug to see where [bug]", err=True)
        return EXIT_BUG
    return status if isinstance(status, int) else 0


def _show_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from importlib import metadata

        click.echo(f"distlaunch {metadata.version('distlaunch')}")
        context.exit()


@click.group(context_settings=CONTEXT)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version.",
)
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with every error.")
def cli() -> None:
    """Start a multi-worker TensorFlow cluster, watch it, and leave nothing behind.

    \b
    distlaunch local --workers 2              the built-in demo on this machine
    distlaunch local --workers 2 train.py     your script
    distlaunch up two_nodes.yaml              a cluster as a spec describes it

    \b
    Exit status: 0 succeeded, 1 a task failed, 2 usage or spec error, 3 infrastructure
    (start-up timeout, node lost), 70 a bug in distlaunch, 128 + n ended by signal n.
    """


def _run_options(command: Callable[..., Any]) -> Callable[..., Any]:
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
            click.option("--no-keras-mend", is_flag=True, help="Leave Keras 3 as it is."),
        )
    ):
        command = option(command)
    return command


class _ProgramCommand(click.Command):
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


@cli.command(cls=_ProgramCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--workers",
    "-n",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Number of workers.",
)
@click.option("--module", "-m", is_flag=True, help="PROGRAM is a Python module, as with `python -m`.")
@click.option("--python", type=click.Path(), metavar="PATH", help="The Python to use.  [default: this one]")
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(min=1),
    metavar="K",
    help="GPUs for each worker.  [default: an equal share]",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds until the cluster must be up; 0 waits for ever.  [default: 600]",
)
@click.option("--oversubscribe", is_flag=True, help="Allow more workers than this machine can well carry.")
@_run_options
@click.argument(
    "program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT ARGS… | -m MODULE ARGS… | -- COMMAND ARGS…]"
)
@click.pass_context
def local(
    context: click.Context,
    workers: int,
    module: bool,
    python: str | None,
    gpus_per_worker: int | None,
    start_timeout: float | None,
    oversubscribe: bool,
    run_dir: Path | None,
    dry_run: bool,
    verbose: bool,
    no_keras_mend: bool,
    program: tuple[str, ...],
) -> int:
    """Emulate a cluster on this machine.

    N workers on 127.0.0.1, each with its own port, TF_CONFIG and log, and its share of cores and GPUs.

    \b
    distlaunch local --workers 2                        the built-in demo
    distlaunch local --workers 2 train.py --epochs 3    a Python script
    distlaunch local --workers 2 -m my.module ARGS      a Python module
    distlaunch local --workers 2 -- ./program ARGS      any other command
    """
    from launcher import local_mode

    if not oversubscribe:
        local_mode.check_workers(workers)
    spec = local_mode.make_spec(
        workers=workers,
        program=local_mode.make_program(program, is_module=module, is_command=context.meta["distlaunch.is_command"]),
        python=python,
        gpus_per_worker=gpus_per_worker,
        start_s=start_timeout,
        mend_keras=not no_keras_mend,
    )
    return _run(spec, run_dir=run_dir, dry_run=dry_run, verbose=verbose)


@cli.command()
@click.argument("spec", type=click.Path(path_type=Path))
@_run_options
def up(spec: Path, run_dir: Path | None, dry_run: bool, verbose: bool, no_keras_mend: bool) -> int:
    """Run the cluster that SPEC describes, to its end.

    Nodes that are other machines are reached over SSH, by your own ssh configuration.
    """
    from launcher.spec import KerasSpec
    from launcher.spec_file import load_spec

    cluster = load_spec(spec, os.environ)
    if no_keras_mend:
        cluster = cluster.model_copy(update={"keras": KerasSpec(mend=False)})
    return _run(cluster, run_dir=run_dir, dry_run=dry_run, verbose=verbose)


@cli.command()
@click.argument("spec", type=click.Path(path_type=Path))
def check(spec: Path) -> None:
    """Check SPEC, and show every mistake with its line.

    Each comes with what to write instead. Nothing is started.
    """
    from launcher.spec_file import load_spec

    cluster = load_spec(spec, os.environ)
    tasks = len(list(cluster.placements()))
    click.echo(
        f"{spec}: good, {tasks} task{'s'[: tasks > 1]} on {len(cluster.nodes)} node{'s'[: len(cluster.nodes) > 1]}"
    )


@cli.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def plan(spec: Path, as_json: bool) -> None:
    """Show what every task of SPEC gets.

    Node, address, port, TF_CONFIG, environment, and the command that runs the task by hand. Secrets are not shown.
    """
    from launcher.spec_file import load_spec

    _show_plan(_plan_ahead(load_spec(spec, os.environ)), as_json=as_json)


@cli.command()
@click.argument("what", type=click.Choice(["spec", "report"]), default="spec")
def schema(what: str) -> None:
    """Print the JSON Schema of a spec, for editors, or of report.json."""
    from launcher.results import RunReport
    from launcher.spec import ClusterSpec

    model = ClusterSpec if what == "spec" else RunReport
    click.echo(json.dumps(model.model_json_schema(), indent=2))


def _run(spec: ClusterSpec, *, run_dir: Path | None, dry_run: bool, verbose: bool) -> int:
    if dry_run:
        _show_plan(_plan_ahead(spec), as_json=False)
        return 0
    from launcher.run import run

    return run(spec, run_dir=run_dir, verbose=verbose).exit_status


def _plan_ahead(spec: ClusterSpec) -> LaunchPlan:
    from launcher.plan import NodeFacts
    from launcher.run import make_replan
    from launcher.spec import LOCAL
    from worker_entry import kernel

    return make_replan(spec)({LOCAL: NodeFacts(kernel.cores(), tuple(kernel.gpus()))}, None)


def _show_plan(launch_plan: LaunchPlan, *, as_json: bool) -> None:
    from launcher.plan import render_json, render_text

    if as_json:
        click.echo(json.dumps(render_json(launch_plan), indent=2, ensure_ascii=False))
    else:
        click.echo(render_text(launch_plan))
