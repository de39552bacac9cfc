"""The commands that run a cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.changes import field_option, find_value, read_changes, setting_option
from launcher.cli.look import find_nodes, show_plan
from launcher.cli.options import (
    module_option,
    rehearsal_option,
    run_options,
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
from launcher.cli.sections import option
from launcher.cli.values import Whole
from launcher.spec.field_options import DEVICES, FRAMEWORK, GPUS_PER_WORKER, PYTHON, STRATEGY

if TYPE_CHECKING:
    from launcher.report.models import RunReport
    from launcher.spec.models import ClusterSpec
    from worker_entry.protocol.strategy_names import StrategyName


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
@field_option(STRATEGY)
@field_option(FRAMEWORK)
@option(
    "--ps",
    section="Cluster",
    type=Whole(min=1),
    metavar="N",
    default_text="1",
    help="Start N parameter servers.",
)
@option(
    "--evaluator",
    section="Cluster",
    is_flag=True,
    help="Start an evaluator as well.",
)
@field_option(DEVICES)
@field_option(GPUS_PER_WORKER)
@option("--oversubscribe", section="Cluster", is_flag=True, help="Start more workers than the cores can run.")
@setting_option
@module_option
@field_option(PYTHON)
@run_options
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT | -m MODULE | -- COMMAND] [ARGS]…")
@click.pass_context
@runs_attached
def local(
    context: click.Context,
    /,
    workers: int | None,
    ps: int | None,
    evaluator: bool,
    module: bool,
    oversubscribe: bool,
    program: tuple[str, ...],
    **options: Any,
) -> int:
    """Run a cluster on this machine.

    Each worker has a port, a TF_CONFIG, a log, and its share of the cores and GPUs.

    \b
    distlaunch local                                  the built-in demo
    distlaunch local --workers 2 train.py --epochs 3  a script, or -m MODULE
    distlaunch local --workers 2 -- ./program ARGS    any other command
    """
    from launcher.spec import command_line
    from worker_entry.system import hardware

    strategy: StrategyName = find_value(context, STRATEGY, "multi_worker_mirrored")
    tasks = command_line.make_tasks(strategy, workers, ps, evaluator=evaluator)
    if not oversubscribe:
        command_line.check_workers(tasks["worker"], hardware.cores())
    spec = command_line.make_spec(
        tasks=tasks,
        strategy=strategy,
        framework=find_value(context, FRAMEWORK, "tensorflow"),
        program=command_line.make_program(program, is_module=module, is_command=context.meta["distlaunch.is_command"]),
    )
    spec = read_changes(context).apply(spec, os.environ)
    return _run(spec, checks=False, misplaced=find_misplaced(context, program), **options)


@click.command(cls=SpecOrProgramCommand)
@takes_spec_or_hosts
@run_options
@option("--no-check", is_flag=True, help="Start without checking the nodes first.")
@rehearsal_option
@click.argument(
    "program",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SPEC | (-H HOSTS | --slurm) PROGRAM [ARGS]…",
    shell_complete=complete_first_spec,
)
@runs_attached
def up(
    given: SpecOrHosts,
    /,
    *,
    no_check: bool,
    rehearsal: int | None,
    **options: Any,
) -> int:
    """Run a cluster from a spec or a list of hosts.

    Checks the nodes first, as `check` does. Options override SPEC.

    \b
    distlaunch up cluster.yaml -- --epochs 3   a spec, and arguments
    distlaunch up -H gpu-a:2,gpu-b:2 train.py  two workers on each machine
    distlaunch up --slurm -m my.module ARGS    in this Slurm job
    """
    from launcher.errors import StartError

    spec = given.load()
    beside = given.find_beside(spec)
    misplaced = find_misplaced(given.context, given.program) if given.names_hosts else []
    try:
        return _run(find_nodes(spec, rehearsal), checks=not no_check, beside=beside, misplaced=misplaced, **options)
    except StartError as error:
        if beside and error.reference == "no-program":
            error.hint = beside
        raise


def _run(
    spec: ClusterSpec,
    *,
    checks: bool,
    misplaced: Sequence[str],
    beside: str = "",
    run_dir: Path | None,
    dry_run: bool,
    verbose: bool,
    no_live: bool,
    detach: bool,
    wait: bool,
    chaos: tuple[str, ...],
) -> int:
    """Runs the spec."""
    if chaos and "max_restarts" not in spec.restart.model_fields_set:
        spec = spec.changed(restart=spec.restart.changed(max_restarts=len(chaos)))  # or there is nothing to resume
    from launcher.controller.launch import run
    from launcher.controller.preview import plan_ahead
    from launcher.controller.resume import find_requeued, resume
    from launcher.controller.task_input import take_stdin
    from launcher.gang.faults import parse_fault

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
