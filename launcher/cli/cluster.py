"""The commands that run a cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.look import find_nodes, show_plan
from launcher.cli.options import (
    module_option,
    option,
    python_option,
    rehearsal_option,
    run_options,
    setting_option,
)
from launcher.cli.programs import (
    ProgramCommand,
    SpecOrHosts,
    SpecOrProgramCommand,
    complete_first_spec,
    find_misplaced,
    takes_spec_or_hosts,
)
from launcher.cli.running import run_command, runs_attached
from launcher.cli.values import OneOf, Whole

if TYPE_CHECKING:
    from launcher.report.models import RunReport
    from launcher.spec.models import ClusterSpec
    from launcher.spec.strategies import Framework
    from worker_entry.protocol.strategy_names import StrategyName


# Not imported from `strategies`, which costs more than the rest of `--help`.
_STRATEGIES = ("one_device", "mirrored", "central_storage", "multi_worker_mirrored", "parameter_server", "tpu")


@click.command(cls=ProgramCommand)
@option(
    "--workers",
    "-n",
    section="Cluster",
    type=Whole(min=1),
    metavar="N",
    default_text="2; 1 for a strategy of one process",
    help="Start N workers.",
)
@option(
    "--strategy",
    section="Cluster",
    type=OneOf(_STRATEGIES),
    metavar="NAME",
    default="multi_worker_mirrored",
    default_text="multi_worker_mirrored",
    help=f"Use this tf.distribute strategy: {', '.join(_STRATEGIES[:-1])} or {_STRATEGIES[-1]}.",
)
@option(
    "--framework",
    section="Cluster",
    type=OneOf(("tensorflow", "torch")),
    metavar="NAME",
    default="tensorflow",
    default_text="tensorflow",
    help="Train with tensorflow or torch; for torch, set torchrun's variables.",
)
@option(
    "--ps",
    section="Cluster",
    type=Whole(min=1),
    metavar="N",
    default_text="1",
    help="Start N parameter servers; parameter_server only.",
)
@option(
    "--evaluator",
    section="Cluster",
    is_flag=True,
    help="Start an evaluator, which runs the same program as the workers.",
)
@option(
    "--devices",
    section="Cluster",
    type=Whole(min=1, max=64),
    metavar="N",
    help="Split each task's CPU into N (1 to 64) devices if there is no GPU.",
)
@option(
    "--gpus-per-worker",
    section="Cluster",
    type=Whole(min=1),
    metavar="K",
    default_text="an equal share",
    help="Give each worker K GPUs.",
)
@option("--oversubscribe", section="Cluster", is_flag=True, help="Start the workers even if there are too few cores.")
@setting_option
@module_option
@python_option
@run_options
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT | -m MODULE | -- COMMAND] [ARGS]…")
@click.pass_context
@runs_attached
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
    settings: tuple[str, ...],
    variables: tuple[str, ...],
    program: tuple[str, ...],
    **options: Any,
) -> int:
    """Run a cluster on this machine.

    Starts N workers on 127.0.0.1, each with its own port, TF_CONFIG and log, and its share of the cores and GPUs.
    `worker_entry.strategies.from_environment()` builds the strategy in the program.

    \b
    distlaunch local --workers 2                      the built-in demo
    distlaunch local --strategy mirrored --devices 4  one process, four devices
    distlaunch local --workers 2 train.py --epochs 3  a Python script
    distlaunch local --workers 2 -m my.module ARGS    a Python module
    distlaunch local --workers 2 -- ./program ARGS    any other command
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
    return _run(_adapt(spec, settings, variables), checks=False, misplaced=find_misplaced(context, program), **options)


@click.command(cls=SpecOrProgramCommand)
@takes_spec_or_hosts
@run_options
@option("--no-check", is_flag=True, help="Start without checking the nodes.")
@rehearsal_option
@click.argument(
    "program",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SPEC [--] [ARGS]… | (-H HOSTS | --slurm) [SCRIPT] [ARGS]…",
    shell_complete=complete_first_spec,
)
@runs_attached
def up(
    given: SpecOrHosts,
    /,
    *,
    variables: tuple[str, ...],
    no_check: bool,
    rehearsal: int | None,
    **options: Any,
) -> int:
    """Run a cluster from a spec or a list of hosts.

    Checks all nodes, as `check` does, then runs the cluster until it ends. Connects to other machines over SSH with
    your ssh configuration. Options override SPEC; ARGS, after `--` if they begin with a dash, are appended
    to the arguments of its program.

    \b
    distlaunch up cluster.yaml                            a spec
    distlaunch up cluster.yaml -- --epochs 3              more program arguments
    distlaunch up cluster.yaml --set stdin=none           override a field
    distlaunch up -H gpu-a:2,gpu-b:2 train.py             two workers on each
    distlaunch up --hostfile hosts.txt -m my.module ARGS  or -- COMMAND ARGS
    distlaunch up --slurm train.py --epochs 3             in this Slurm job
    """
    from launcher.errors import StartError

    spec = _adapt(given.load(variables), given.settings, variables)
    beside = given.find_beside(spec)
    misplaced = find_misplaced(given.context, given.program) if given.names_hosts else []
    try:
        return _run(find_nodes(spec, rehearsal), checks=not no_check, beside=beside, misplaced=misplaced, **options)
    except StartError as error:
        if beside and error.reference == "no-program":
            error.hint = beside
        raise


def _adapt(spec: ClusterSpec, settings: Sequence[str], variables: Sequence[str]) -> ClusterSpec:
    """The spec with the changes of `--set` and `-e`."""
    from launcher.spec.settings import set_fields
    from launcher.spec.variables import check_variables, set_variables

    spec = set_variables(set_fields(spec, settings), variables, os.environ)
    check_variables(spec, os.environ)
    return spec


def _run(
    spec: ClusterSpec,
    *,
    checks: bool,
    misplaced: Sequence[str],
    beside: str = "",
    run_dir: Path | None,
    dry_run: bool,
    verbose: bool,
    isolate: bool,
    no_live: bool,
    no_keras_patch: bool,
    max_restarts: int | None,
    start_s: float | None,
    stall_s: float | None,
    drain_s: float | None,
    stop_grace_s: float | None,
    lease_s: float | None,
    no_progress: bool,
    sample_every_s: float | None,
    metrics: str | None,
    metrics_file: str | None,
    no_preload: bool,
    keep_warm_s: float | None,
    report: bool,
    keep_own_tf_config: bool,
    tensorboard: bool,
    keep_tensorboard: bool,
    detach: bool,
    wait: bool,
    chaos: tuple[str, ...],
) -> int:
    """Runs the spec, overridden by the options of `run_options`."""
    from launcher.spec.overrides import Override, override

    if chaos and max_restarts is None and not spec.restart.max_restarts:
        max_restarts = len(chaos)  # without a restart, there is nothing to resume
    spec = override(
        spec,
        Override("--isolate", ("isolation",), "namespace" if isolate else None),
        Override("--no-keras-patch", ("keras", "patch"), False if no_keras_patch else None),
        Override("--max-restarts", ("restart", "max_restarts"), max_restarts),
        Override("--start-timeout", ("timeouts", "start_s"), start_s),
        Override("--stall-timeout", ("timeouts", "stall_s"), stall_s),
        Override("--drain-timeout", ("timeouts", "drain_s"), drain_s),
        Override("--stop-grace", ("timeouts", "stop_grace_s"), stop_grace_s),
        Override("--lease", ("timeouts", "lease_s"), lease_s),
        Override("--sample-every", ("sample_every_s",), sample_every_s),
        Override("--report", ("report",), True if report else None),
        Override("--metrics", ("metrics",), metrics),
        Override("--metrics-file", ("metrics_file",), metrics_file),
        Override("--no-progress", ("progress",), False if no_progress else None),
        Override("--no-preload", ("preload",), False if no_preload else None),
        Override("--keep-warm", ("keep_warm_s",), keep_warm_s),
        Override("--keep-own-tf-config", ("keep_own_tf_config",), True if keep_own_tf_config else None),
        Override("--tensorboard", ("tensorboard",), True if tensorboard else None),
        Override("--keep-tensorboard", ("tensorboard",), "keep" if keep_tensorboard else None),
    )
    from launcher.gang.faults import parse_fault
    from launcher.run.launch import run
    from launcher.run.preview import plan_ahead
    from launcher.run.resume import find_requeued, resume
    from launcher.run.task_input import take_stdin

    faults = [parse_fault(text, spec) for text in chaos]
    advise = functools.partial(_advise, misplaced=misplaced, beside=beside)
    if dry_run:
        show_plan(plan_ahead(spec, run_dir), as_json=False)
        return 0
    requeued = find_requeued(run_dir, os.environ)
    if requeued is not None:
        again = functools.partial(resume, requeued, spec, environ=os.environ, verbose=verbose)
        return run_command(again, detach=detach, wait=wait, live=not no_live, advise=advise)
    start = functools.partial(
        run,
        spec,
        run_dir=run_dir,
        verbose=verbose,
        checks=checks,
        faults=faults,
        stdin=take_stdin() if spec.stdin != "none" else None,
    )
    return run_command(start, detach=detach, wait=wait, live=not no_live, advise=advise)


def _advise(report: RunReport, *, misplaced: Sequence[str], beside: str) -> str:
    """A line about the command that started a run which failed at once; empty if there is none.

    Args:
        report: the report of the run.
        misplaced: options of this command that were given to the program.
        beside: what to do about a program that is missing.
    """
    if report.verdict.reference == "no-program":
        return beside
    failed = report.verdict.reference == "task-failed" and report.attempts
    if not failed or not misplaced or any(task.progress for task in report.attempts[-1].tasks):
        return ""
    names = ", ".join(misplaced)
    if len(misplaced) == 1:
        return f"{names} stands after the program, so it is the program's; put it before the program for distlaunch"
    return f"{names} stand after the program, so they are the program's; put them before the program for distlaunch"
