"""The commands that run a cluster, in the foreground, in the background, or as a job."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.changes import field_option, setting_option, variable_option
from launcher.cli.completion import complete_specs
from launcher.cli.early_agent import agent_started
from launcher.cli.options import (
    detach_options,
    json_option,
    module_option,
    rehearsal_option,
    run_argument,
    run_options,
)
from launcher.cli.programs import (
    ProgramCommand,
    SpecCommand,
    SpecOrHosts,
    SpecOrProgramCommand,
    complete_first_spec,
    find_misplaced,
    load_changed,
    make_local_spec,
    takes_spec_or_hosts,
)
from launcher.cli.sections import SectionedCommand, option
from launcher.cli.specs import choose_nodes, show_plan
from launcher.cli.values import Whole
from launcher.spec.field_options import DEVICES, FRAMEWORK, GPUS_PER_WORKER, PYTHON, STRATEGY

if TYPE_CHECKING:
    from pathlib import Path

    from launcher.commands.submit_controller import SubmittedController
    from launcher.controller.detach import Detachment
    from launcher.report.models import RunReport
    from launcher.spec.models import ClusterSpec
    from launcher.transports.agent_process import EarlyAgent

_DETACHMENT = "distlaunch.detachment"


def runs_attached(command: Callable[..., int]) -> Callable[..., int]:
    """Lets the run of a command leave the terminal when the user asks for it.

    The shell must wait for a process other than the controller. The command forks that process before it imports
    anything, so that the process needs little memory.
    """

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> int:
        from launcher.console.opening import can_be_live

        if options["detach"] or options["wait"] or options["no_live"] or options.get("dry_run") or not can_be_live():
            return command(*arguments, **options)
        from launcher.controller.detach import can_run_attached, run_attached

        if not can_run_attached():
            return command(*arguments, **options)

        def start(detachment: Detachment) -> int:
            click.get_current_context().meta[_DETACHMENT] = detachment
            return command(*arguments, **options)

        return _finish(*run_attached(start))

    return run


def run_command(
    start: Callable[..., RunReport],
    *,
    detach: bool,
    wait: bool,
    live: bool,
    advise: Callable[[RunReport], str] = lambda _: "",
) -> int:
    """Runs a cluster in the background or in the foreground.

    Args:
        start: starts the run.
        detach: whether it continues in the background; `wait` implies it.
        wait: whether to return only once the cluster is up.
        live: whether a run in the foreground has the live view.
        advise: returns a last line about an ended run, or nothing.

    Returns:
        The exit status.
    """

    def conclude(report: RunReport) -> int:
        if line := advise(report):
            click.echo(line, err=True)
        return report.exit_status

    if not detach and not wait:
        detachment = click.get_current_context().meta.get(_DETACHMENT)
        return conclude(start(live=live, detachment=detachment))
    from launcher.controller.detach import run_detached

    def run(detachment: Detachment) -> int:
        return conclude(start(detachment=detachment))

    return _finish(*run_detached(run, needs_cluster=wait))


def _finish(status: int | None, directory: Path | None) -> int:
    """Returns the exit status; first prints the commands for a run that has left the terminal."""
    if directory is None:
        assert status is not None
        return status
    from launcher.rundir.names import name_run

    name = name_run(directory)
    click.echo(name)
    for verb, what in (("attach", "follow it"), ("status", "see its tasks"), ("down", "stop it")):
        click.echo(f"  distlaunch {verb} {name:<{len(name) + 7 - len(verb)}}  {what}", err=True)
    return 0


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
    # A run in the background gets another process as its controller; with other tasks, its name is another.
    is_plain = not (options["detach"] or options["wait"] or options["dry_run"] or ps or evaluator)
    started = agent_started(context, program, module=module, workers=workers, run_dir=options["run_dir"])
    with started if is_plain else contextlib.nullcontext() as early:
        spec = make_local_spec(
            context, program, module=module, workers=workers, ps=ps, evaluator=evaluator, oversubscribe=oversubscribe
        )
        return _run(spec, checks=False, misplaced=find_misplaced(context, program), early=early, **options)


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
    """
    from launcher.errors import StartError

    spec = given.load()
    beside = given.find_beside(spec)
    misplaced = find_misplaced(given.context, given.program) if given.names_hosts else []
    try:
        return _run(choose_nodes(spec, rehearsal), checks=not no_check, beside=beside, misplaced=misplaced, **options)
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
    early: EarlyAgent | None = None,
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
        early=early,
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


@click.command(cls=SectionedCommand)
@run_argument
@option("--spec", type=click.Path(path_type=Path), metavar="FILE", help="Use another spec for the rest of the run.")
@detach_options
@option("--verbose", "-v", is_flag=True, help="Show TensorFlow's start-up messages, and details of starts.")
@option("--no-live", is_flag=True, help="Print plain lines instead of the live view.")
@runs_attached
def resume(run: str | None, spec: Path | None, detach: bool, wait: bool, verbose: bool, no_live: bool) -> int:
    """Resume a run that has ended, or whose controller is gone.

    RUN is a run's name, a part of it, or its folder; default: the latest run, if no run is running. Takes over tasks
    that still train on other machines: they continue, and their logs have no gap. Otherwise stops leftover processes of
    the last attempt and starts a new attempt in the same folder, where the program finds its checkpoints. The run's
    files contain no secrets; secrets come from this environment or from FILE.
    """
    from launcher.controller.resume import resume
    from launcher.rundir.select import select_run
    from launcher.sources.node_list import find_nodes_first
    from launcher.spec.loading import load_spec

    files = select_run(run)
    changed = find_nodes_first(load_spec(spec, os.environ)) if spec is not None else None
    start = functools.partial(resume, files, changed, environ=os.environ, verbose=verbose)
    return run_command(start, detach=detach, wait=wait, live=not no_live)


@click.command(cls=SpecCommand)
@setting_option
@variable_option
@option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Write the run's files to this new folder.")
@option("--no-check", is_flag=True, help="Start without checking the nodes.")
@option("--dry-run", is_flag=True, help="Print the job's script or manifests without queueing it.")
@json_option
@click.argument("spec", type=click.Path(path_type=Path), shell_complete=complete_specs)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [ARGS]…")
@click.pass_context
def submit(
    context: click.Context,
    /,
    spec: Path,
    arguments: tuple[str, ...],
    run_dir: Path | None,
    no_check: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Queue a Slurm or Kubernetes job that runs a spec.

    SPEC has `nodes: slurm`, and the job's resources under `slurm:`; ARGS are appended to the arguments of its program.
    The run continues in the same folder when Slurm requeues the job; with `restart:`, the job requeues itself after a
    preemption and at its time limit. `ls`, `status`, `logs -f` and `down` work as soon as the job is queued.

    With `nodes: {from: kubernetes, …}`, distlaunch runs in a pod, with only the rights that it needs.
    """
    from launcher.commands import submit as submission
    from launcher.commands import submit_controller
    from launcher.errors import UsageError
    from launcher.spec.pods import PodsSpec

    cluster = load_changed(context, spec, arguments)
    if isinstance(cluster.source, PodsSpec):
        if run_dir is not None:
            raise UsageError("the run's files are in its controller's pod", hint="remove --run-dir")
        prepared = submit_controller.prepare(cluster, os.environ, checks=not no_check)
        if dry_run:
            click.echo(submit_controller.render(prepared), nl=False)
            return
        _tell_controller(submit_controller.submit(prepared), as_json=as_json)
        return
    submission.check_fits(cluster)
    if dry_run:
        click.echo(submission.render(cluster, run_dir), nl=False)
        return
    submitted = submission.submit(cluster, run_dir, checks=not no_check)
    from launcher.rundir.names import name_run

    name = name_run(submitted.directory)
    if as_json:
        click.echo(json.dumps({"job": submitted.job, "run": name, "directory": str(submitted.directory)}))
        return
    click.echo(submitted.job)
    click.echo(f"Queued job {submitted.job}: run {name}", err=True)
    for verb, what in (("status", "show its state"), ("logs -f", "follow its output"), ("down", "cancel it")):
        click.echo(f"  distlaunch {verb} {name:<{len(name) + 8 - len(verb)}}  {what}", err=True)


def _tell_controller(submitted: SubmittedController, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"job": submitted.job}))
        return
    click.echo(submitted.job)
    click.echo(f"Created job {submitted.job}", err=True)
    kubectl = shlex.join(submitted.kubectl.words)
    for verb, what in (("logs --follow", "follow its output"), ("delete", "stop the run and remove its pods")):
        click.echo(f"  {kubectl} {verb} job/{submitted.job}  {what}", err=True)
