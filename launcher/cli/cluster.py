"""The commands that run, check or show a cluster."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.completion import complete_specs
from launcher.cli.options import ProgramCommand, option, rehearsal_option, run_options
from launcher.cli.sections import SectionedCommand

if TYPE_CHECKING:
    from launcher.plan.launch_plan import LaunchPlan
    from launcher.report.models import RunReport
    from launcher.spec.models import ClusterSpec
    from launcher.spec.strategies import Framework
    from worker_entry.protocol.strategy_names import StrategyName


# Not imported from `strategies`, which costs more than the rest of `--help`.
_STRATEGIES = ("one_device", "mirrored", "central_storage", "multi_worker_mirrored", "parameter_server", "tpu")


@click.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
@option(
    "--workers",
    "-n",
    section="Cluster",
    type=click.IntRange(min=1),
    metavar="N",
    default_text="2; 1 for a strategy of one process",
    help="Start N workers.",
)
@option(
    "--strategy",
    section="Cluster",
    type=click.Choice(_STRATEGIES),
    metavar="NAME",
    default="multi_worker_mirrored",
    default_text="multi_worker_mirrored",
    help=f"Use this tf.distribute strategy: {', '.join(_STRATEGIES[:-1])} or {_STRATEGIES[-1]}.",
)
@option(
    "--framework",
    section="Cluster",
    type=click.Choice(("tensorflow", "torch")),
    metavar="NAME",
    default="tensorflow",
    default_text="tensorflow",
    help="Train with tensorflow or torch; torch gets torchrun's variables.",
)
@option(
    "--ps",
    section="Cluster",
    type=click.IntRange(min=1),
    metavar="N",
    default_text="1",
    help="Start N parameter servers; parameter_server only.",
)
@option(
    "--evaluator",
    section="Cluster",
    is_flag=True,
    help="Start an evaluator, which runs the workers' program.",
)
@option(
    "--devices",
    section="Cluster",
    type=click.IntRange(min=1, max=64),
    metavar="N",
    help="Split each task's CPU into N (1 to 64) devices if there is no GPU.",
)
@option(
    "--gpus-per-worker",
    section="Cluster",
    type=click.IntRange(min=1),
    metavar="K",
    default_text="an equal share",
    help="Give each worker K GPUs.",
)
@option("--oversubscribe", section="Cluster", is_flag=True, help="Start the workers even on too few cores.")
@option("--module", "-m", section="Program", is_flag=True, help="Run a Python module, as `python -m` does.")
@option(
    "--python",
    section="Program",
    type=click.Path(),
    metavar="PATH",
    default_text="the one that runs distlaunch",
    help="Use this Python interpreter.",
)
@run_options
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT | -m MODULE | -- COMMAND] [ARGS]…")
@click.pass_context
def local(
    context: click.Context,
    /,
    workers: int | None,
    strategy: StrategyName,
    framework: Framework,
    ps: int | None,
    evaluator: bool,
    devices: int | None,
    module: bool,
    python: str | None,
    gpus_per_worker: int | None,
    oversubscribe: bool,
    program: tuple[str, ...],
    **options: Any,
) -> int:
    """Run a cluster on this machine.

    Starts N workers on 127.0.0.1, each with its own port, TF_CONFIG and log, and its share of the cores and GPUs.
    `worker_entry.strategies.from_environment()` builds the strategy in the program.

    \b
    distlaunch local --workers 2                        the built-in demo
    distlaunch local --strategy mirrored --devices 4    the demo in one process with four devices
    distlaunch local --workers 2 train.py --epochs 3    a Python script
    distlaunch local --workers 2 -m my.module ARGS      a Python module
    distlaunch local --workers 2 -- ./program ARGS      any other command
    """
    from launcher.spec import command_line
    from worker_entry.system import hardware

    tasks = command_line.make_tasks(strategy, workers, ps, evaluator=evaluator)
    if not oversubscribe:
        command_line.check_workers(tasks["worker"], hardware.cores())
    spec = command_line.make_spec(
        tasks=tasks,
        strategy=strategy,
        framework=framework,
        devices=devices,
        program=command_line.make_program(program, is_module=module, is_command=context.meta["distlaunch.is_command"]),
        python=python,
        gpus_per_worker=gpus_per_worker,
    )
    return _run(spec, checks=False, **options)


@click.command(cls=SectionedCommand)
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@run_options
@option("--no-check", is_flag=True, help="Start without checking the nodes.")
@rehearsal_option
def up(spec: Path, no_check: bool, rehearsal: int | None, **options: Any) -> int:
    """Run the cluster of a spec.

    Checks all nodes, as `check` does, then runs the cluster to its end. Connects to other machines over SSH with your
    own ssh configuration. Options override SPEC.
    """
    return _run(_load(spec, rehearsal), checks=not no_check, **options)


@click.command(cls=SectionedCommand)
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--spec-only", is_flag=True, help="Check only the file; connect to no machine.")
@rehearsal_option
def check(spec: Path, as_json: bool, spec_only: bool, rehearsal: int | None) -> int:
    """Check a spec and its nodes, and start nothing.

    Shows every mistake of the file with its line and the correction. Then checks each node: interpreter, versions,
    GPUs, disk, clock, program; and has each node connect to the address of every task, its own tasks included. `up`
    does the same before it starts.

    Exit status: 0 no problem found, 2 the spec is wrong, 3 a node is not fit for it.
    """
    cluster = _load(spec, rehearsal)
    if spec_only:
        tasks = len(list(cluster.placements()))
        nodes = len(cluster.nodes)
        from launcher.wording import count_of

        click.echo(f"{spec}: good, {count_of(tasks, 'task')} on {count_of(nodes, 'node')}")
        return 0
    from launcher.report.check_text import COLUMNS, make_rows, render_findings
    from launcher.run import launch

    report = launch.check(cluster)
    if as_json:
        click.echo(report.model_dump_json(indent=2))
    else:
        from launcher.console.terminal import render_table

        click.echo(render_table(COLUMNS, make_rows(report)))
        click.echo("\n".join(render_findings(report)))
    return 0 if report.good else 3


@click.command(cls=SectionedCommand)
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@rehearsal_option
def plan(spec: Path, as_json: bool, rehearsal: int | None) -> None:
    """Show what each task of a spec gets.

    Shows node, address, port, TF_CONFIG and environment, and the command that runs the task by hand. Secrets are
    hidden.
    """
    from launcher.run.launch import plan_ahead

    _show_plan(plan_ahead(_load(spec, rehearsal)), as_json=as_json)


def _load(path: Path, rehearsal: int | None) -> ClusterSpec:
    """The spec of a file; with `rehearsal`, on so many containers instead of its machines."""
    from launcher.spec.loading import load_spec

    spec = load_spec(path, os.environ)
    if rehearsal is None:
        return spec
    from launcher.spec.rehearsal import rehearse

    return rehearse(spec, rehearsal)


def _run(
    spec: ClusterSpec,
    *,
    checks: bool,
    run_dir: Path | None,
    dry_run: bool,
    verbose: bool,
    no_keras_patch: bool,
    max_restarts: int | None,
    start_s: float | None,
    stall_s: float | None,
    drain_s: float | None,
    stop_grace_s: float | None,
    lease_s: float | None,
    no_progress: bool,
    no_preload: bool,
    keep_own_tf_config: bool,
    tensorboard: bool,
    keep_tensorboard: bool,
    detach: bool,
    chaos: tuple[str, ...],
) -> int:
    """Runs the spec, overridden by the options of `run_options`."""
    from launcher.spec.overrides import Override, override

    if chaos and max_restarts is None and not spec.restart.max_restarts:
        max_restarts = len(chaos)  # or there is nothing to resume
    spec = override(
        spec,
        Override("--no-keras-patch", ("keras", "patch"), False if no_keras_patch else None),
        Override("--max-restarts", ("restart", "max_restarts"), max_restarts),
        Override("--start-timeout", ("timeouts", "start_s"), start_s),
        Override("--stall-timeout", ("timeouts", "stall_s"), stall_s),
        Override("--drain-timeout", ("timeouts", "drain_s"), drain_s),
        Override("--stop-grace", ("timeouts", "stop_grace_s"), stop_grace_s),
        Override("--lease", ("timeouts", "lease_s"), lease_s),
        Override("--no-progress", ("progress",), False if no_progress else None),
        Override("--no-preload", ("preload",), False if no_preload else None),
        Override("--keep-own-tf-config", ("keep_own_tf_config",), True if keep_own_tf_config else None),
        Override("--tensorboard", ("tensorboard",), True if tensorboard else None),
        Override("--keep-tensorboard", ("tensorboard",), "keep" if keep_tensorboard else None),
    )
    from launcher.gang.faults import parse_fault
    from launcher.run.launch import plan_ahead, run

    faults = [parse_fault(text, spec) for text in chaos]
    if dry_run:
        _show_plan(plan_ahead(spec, run_dir), as_json=False)
        return 0
    start = functools.partial(run, spec, run_dir=run_dir, verbose=verbose, checks=checks, faults=faults)
    return start().exit_status if not detach else run_in_background(start)


def run_in_background(start: Callable[..., RunReport]) -> int:
    """Runs in the background; says how to go on once the cluster is up. Returns the exit status."""
    from launcher.run.detached import run_detached

    status, directory = run_detached(lambda detachment: start(detachment=detachment).exit_status)
    if directory is None:
        assert status is not None
        return status
    from launcher.run.naming import name_run

    name = name_run(directory)
    click.echo(name)
    for verb, what in (("attach", "follow it"), ("status", "see its tasks"), ("down", "stop it")):
        click.echo(f"  distlaunch {verb} {name:<{len(name) + 7 - len(verb)}}  {what}", err=True)
    return 0


def _show_plan(launch_plan: LaunchPlan, *, as_json: bool) -> None:
    from launcher.plan.rendering import render_json, render_text

    if as_json:
        click.echo(json.dumps(render_json(launch_plan), indent=2, ensure_ascii=False))
    else:
        click.echo(render_text(launch_plan))
