"""The commands that take a program or a spec: what they run, check or show."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.options import ProgramCommand, rehearsal_option, run_options

if TYPE_CHECKING:
    from launcher.plan.launch_plan import LaunchPlan
    from launcher.spec.models import ClusterSpec
    from launcher.spec.strategies import Framework, StrategyName


# Not imported from `strategies`, which would cost more than all else of `--help`.
_STRATEGIES = ("one_device", "mirrored", "central_storage", "multi_worker_mirrored", "parameter_server", "tpu")


@click.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "--workers",
    "-n",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of workers.  [default: 2, or 1 where a strategy has but one process]",
)
@click.option(
    "--strategy",
    type=click.Choice(_STRATEGIES),
    default="multi_worker_mirrored",
    show_default=True,
    help="The tf.distribute strategy; `worker_entry.strategies.from_environment()` builds it.",
)
@click.option(
    "--framework",
    type=click.Choice(("tensorflow", "torch")),
    default="tensorflow",
    show_default=True,
    help="What the program trains with; torch gets the variables of torchrun.",
)
@click.option("--ps", type=click.IntRange(min=1), metavar="N", help="Number of parameter servers.  [default: 1]")
@click.option("--evaluator", is_flag=True, help="An evaluator beside the workers, which runs the same program.")
@click.option(
    "--devices",
    type=click.IntRange(min=1, max=64),
    metavar="N",
    help="Divide the CPU into N devices for each task, where there is no GPU.",
)
@click.option("--module", "-m", is_flag=True, help="PROGRAM is a Python module, as with `python -m`.")
@click.option("--python", type=click.Path(), metavar="PATH", help="The Python to use.  [default: this one]")
@click.option(
    "--gpus-per-worker",
    type=click.IntRange(min=1),
    metavar="K",
    help="GPUs for each worker.  [default: an equal share]",
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
    """Emulate a cluster on this machine.

    N workers on 127.0.0.1, each with its own port, TF_CONFIG and log, and its share of cores and GPUs.

    \b
    distlaunch local --workers 2                        the built-in demo
    distlaunch local --strategy mirrored --devices 4    the same in one process with four devices
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


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@run_options
@click.option("--no-check", is_flag=True, help="Start without looking at the nodes first.")
@rehearsal_option
def up(spec: Path, no_check: bool, rehearsal: int | None, **options: Any) -> int:
    """Run the cluster that SPEC describes, to its end.

    Nodes that are other machines are reached over SSH, by your own ssh configuration. All are checked first, as
    `check` does.
    """
    return _run(_load(spec, rehearsal), checks=not no_check, **options)


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
@click.option("--spec-only", is_flag=True, help="Look at the file only, at no machine.")
@rehearsal_option
def check(spec: Path, as_json: bool, spec_only: bool, rehearsal: int | None) -> int:
    """Check SPEC and its nodes, and start nothing.

    Every mistake of the file is shown with its line and what to write instead. Then all nodes are looked at:
    interpreter, versions, GPUs, disk, clock, program; and each dials every task's address, itself included. `up` does
    the same before it starts.

    Exit status: 0 good, 2 the spec is wrong, 3 the nodes are not fit for it.
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


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
@rehearsal_option
def plan(spec: Path, as_json: bool, rehearsal: int | None) -> None:
    """Show what every task of SPEC gets.

    Node, address, port, TF_CONFIG, environment, and the command that runs the task by hand. Secrets are not shown.
    """
    from launcher.run.launch import plan_ahead

    _show_plan(plan_ahead(_load(spec, rehearsal)), as_json=as_json)


@click.command()
@click.argument("spec", type=click.Path(path_type=Path))
@click.option(
    "--nodes",
    "-n",
    type=click.IntRange(min=1, max=64),
    metavar="N",
    help="Number of containers: SPEC's first nodes, or more like its last.  [default: as many as SPEC has]",
)
def compose(spec: Path, nodes: int | None) -> None:
    """Write a Compose file that stands for SPEC's machines, to rehearse it on this one.

    \b
    distlaunch compose two_nodes.yaml > compose.yaml
    docker compose run --rm controller
    docker compose down --volumes

    Call it in the folder that has the program and the spec: every container sees that as /project. The image is
    built once from docker/Dockerfile, as the file's first lines say.
    """
    from launcher.errors import UsageError
    from launcher.plan.compose import render_compose
    from launcher.run.naming import current_directory
    from launcher.spec.loading import load_spec

    here = current_directory()
    path = spec.resolve()
    cluster = load_spec(spec)
    if not path.is_relative_to(here):
        raise UsageError(f"{spec} is not below {here}, which is all that containers see", hint="call it in its folder")
    click.echo(render_compose(cluster, str(path.relative_to(here)), nodes or len(cluster.nodes)), nl=False)


def _load(path: Path, rehearsal: int | None) -> ClusterSpec:
    """The spec of a file; on containers in place of its machines, if so many are given."""
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
    chaos: tuple[str, ...],
) -> int:
    """Runs the spec with what the command line says about it; the options of `run_options`."""
    from launcher.spec.overrides import Override, override

    if chaos and max_restarts is None and not spec.restart.max_restarts:
        max_restarts = len(chaos)  # to see what becomes of it
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
    return run(spec, run_dir=run_dir, verbose=verbose, checks=checks, faults=faults).exit_status


def _show_plan(launch_plan: LaunchPlan, *, as_json: bool) -> None:
    from launcher.plan.rendering import render_json, render_text

    if as_json:
        click.echo(json.dumps(render_json(launch_plan), indent=2, ensure_ascii=False))
    else:
        click.echo(render_text(launch_plan))
