"""The command line; the one place where errors become exit statuses.

Nothing but click is imported until a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from launcher.cli_options import ProgramCommand, run_options

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
    distlaunch check two_nodes.yaml           whether its nodes are fit for it

    \b
    Exit status: 0 succeeded, 1 a task failed, 2 usage or spec error, 3 infrastructure
    (start-up timeout, node lost), 70 a bug in distlaunch, 128 + n ended by signal n.
    """


@cli.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
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
@run_options
@click.argument(
    "program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT ARGS… | -m MODULE ARGS… | -- COMMAND ARGS…]"
)
@click.pass_context
def local(
    context: click.Context,
    /,
    workers: int,
    module: bool,
    python: str | None,
    gpus_per_worker: int | None,
    start_timeout: float | None,
    oversubscribe: bool,
    program: tuple[str, ...],
    **options: Any,
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
    )
    return _run(spec, checks=False, **options)


@cli.command()
@click.argument("spec", type=click.Path(path_type=Path))
@run_options
@click.option("--no-check", is_flag=True, help="Start without looking at the nodes first.")
def up(spec: Path, no_check: bool, **options: Any) -> int:
    """Run the cluster that SPEC describes, to its end.

    Nodes that are other machines are reached over SSH, by your own ssh configuration. All are checked first, as
    `check` does.
    """
    from launcher.spec_file import load_spec

    return _run(load_spec(spec, os.environ), checks=not no_check, **options)


@cli.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
@click.option("--spec-only", is_flag=True, help="Look at the file only, at no machine.")
def check(spec: Path, as_json: bool, spec_only: bool) -> int:
    """Check SPEC and its nodes, and start nothing.

    Every mistake of the file is shown with its line and what to write instead. Then all nodes are looked at:
    interpreter, versions, GPUs, disk, clock, program; and each dials every task's address, itself included. `up` does
    the same before it starts.

    Exit status: 0 good, 2 the spec is wrong, 3 the nodes are not fit for it.
    """
    from launcher.spec_file import load_spec

    cluster = load_spec(spec, os.environ)
    if spec_only:
        tasks = len(list(cluster.placements()))
        nodes = len(cluster.nodes)
        click.echo(f"{spec}: good, {tasks} task{'s'[: tasks > 1]} on {nodes} node{'s'[: nodes > 1]}")
        return 0
    from launcher import run
    from launcher.check_report import COLUMNS, make_rows, render_findings

    report = run.check(cluster)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        from launcher.terminal import render_table

        click.echo(render_table(COLUMNS, make_rows(report)))
        click.echo("\n".join(render_findings(report)))
    return 0 if report.good else 3


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
@click.argument("what", metavar="RUN|SPEC")
def clean(what: str) -> int:
    """End what is left on the nodes of a run whose distlaunch is gone.

    RUN is a run's folder or name. With a SPEC, its nodes are cleaned of all runs that were started from here and are
    not under way. Only processes that are provably of those runs are ended. An agent that hears nothing ends by
    itself after `timeouts.lease_s`; this does not wait for that.

    Exit status: 0 nothing is left, 2 the run is still under way, 3 a node could not be asked or cleaned.
    """
    from launcher.clean import clean

    good = True
    for node in clean(what):
        click.echo(str(node))
        good = good and node.good
    return 0 if good else 3


@cli.command()
@click.argument("run")
def down(run: str) -> int:
    """End a running RUN, as Ctrl-C in its terminal does, and wait until nothing is left of it.

    RUN is a run's folder or name.

    Exit status: 0 it is over, 3 it has not ended in time.
    """
    from launcher.run_dir import find_run

    found = find_run(run)
    ended = found.ask_to_end()
    click.echo(f"Ended: {found.root}" if ended else f"Was over: {found.root}")
    return 0


@cli.command()
@click.argument("run")
def stacks(run: str) -> int:
    """Show what all tasks of a running RUN are doing: their Python stacks, equal ones together.

    RUN is a run's folder or name. Nothing is stopped. SIGUSR1 to its distlaunch does the same, on its own terminal.
    """
    from launcher.run_dir import find_run

    click.echo(find_run(run).ask_stacks(), nl=False)
    return 0


@cli.command()
@click.argument("what", type=click.Choice(["spec", "report", "check"]), default="spec")
def schema(what: str) -> None:
    """Print the JSON Schema of a spec, for editors, of report.json, or of what `check --json` prints."""
    from launcher.results import CheckReport, RunReport
    from launcher.spec import ClusterSpec

    models: dict[str, Any] = {"spec": ClusterSpec, "report": RunReport, "check": CheckReport}
    click.echo(json.dumps(models[what].model_json_schema(), indent=2))


def _run(
    spec: ClusterSpec,
    *,
    checks: bool,
    run_dir: Path | None,
    dry_run: bool,
    verbose: bool,
    no_keras_mend: bool,
    max_restarts: int | None,
    stall_timeout: float | None,
    no_progress: bool,
    no_preload: bool,
    chaos: tuple[str, ...],
) -> int:
    """Runs the spec with what the command line says about it; the options of `run_options`."""
    from launcher.overrides import override

    if chaos and max_restarts is None and not spec.restart.max_restarts:
        max_restarts = len(chaos)  # to see what becomes of it
    spec = override(
        spec,
        mend_keras=False if no_keras_mend else None,
        max_restarts=max_restarts,
        stall_s=stall_timeout,
        progress=False if no_progress else None,
        preload=False if no_preload else None,
    )
    if dry_run:
        _show_plan(_plan_ahead(spec), as_json=False)
        return 0
    from launcher.chaos import parse_fault
    from launcher.run import run

    faults = [parse_fault(text, spec) for text in chaos]
    return run(spec, run_dir=run_dir, verbose=verbose, checks=checks, faults=faults).exit_status


def _plan_ahead(spec: ClusterSpec) -> LaunchPlan:
    from launcher.casting import at_first
    from launcher.plan import NodeFacts
    from launcher.run import make_replan
    from launcher.spec import LOCAL
    from worker_entry import kernel

    return make_replan(at_first(spec))({LOCAL: NodeFacts(kernel.cores(), tuple(kernel.gpus()))}, None, None)


def _show_plan(launch_plan: LaunchPlan, *, as_json: bool) -> None:
    from launcher.plan import render_json, render_text

    if as_json:
        click.echo(json.dumps(render_json(launch_plan), indent=2, ensure_ascii=False))
    else:
        click.echo(render_text(launch_plan))
