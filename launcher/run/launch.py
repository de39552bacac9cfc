"""Assembles a run from its folder, transports and console, and runs it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.console.writer import Console, open_console
from launcher.errors import InterruptionError, RunDirectoryError, ShownError, TakenOverError
from launcher.gang.faults import Fault
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.planner import Planner, place
from launcher.plan.rendering import render_spec
from launcher.plan.resources import NodeFacts
from launcher.report.check_report import make_check_report
from launcher.report.models import CheckReport, RunReport
from launcher.report.run_report import end_by_error, make_run_report, make_versions
from launcher.run.answers import Answers
from launcher.run.context import AttemptSetup, RunContext
from launcher.run.control import ControlServer
from launcher.run.detached import Detachment
from launcher.run.directory import RunDir, RunStart
from launcher.run.history import NO_HISTORY, History
from launcher.run.interrupts import Interruption, Interrupts
from launcher.run.journal import Journal
from launcher.run.naming import current_directory, make_run_id, runs_directory
from launcher.run.node_links import NodeLinks
from launcher.run.node_list import know_nodes
from launcher.run.supervisor import Supervisor
from launcher.run.sync import Bundle, make_bundle
from launcher.run.ways import Recovery, Relisting, make_transports
from launcher.spec.models import LOCAL, ClusterSpec
from launcher.tasks import TaskId
from launcher.transports.targets import Targets, find_addresses, find_targets
from launcher.wording import count_of
from worker_entry.system import clock, hardware


def run(
    spec: ClusterSpec,
    *,
    run_dir: Path | None,
    verbose: bool,
    checks: bool,
    faults: Sequence[Fault] = (),
    detachment: Detachment | None = None,
) -> RunReport:
    """Runs the cluster to its end.

    Args:
        spec: what to run.
        run_dir: the folder for the run's files; by default a new one in the user's state directory.
        verbose: whether the console shows TensorFlow's start-up messages.
        checks: whether the nodes are checked before the start.
        faults: what is injected into it.
        detachment: leaves the terminal once the cluster is up; None in the foreground.

    Raises:
        DistlaunchError: the cluster could not be started; nothing is left running.
        ShownError: an error ended the started cluster; the report is written.
    """
    clock.share()
    spec = know_nodes(spec)
    cwd = current_directory()  # where this machine's tasks run; fails before anything is written
    run_id = make_run_id(spec.name)
    start = RunStart(run_id=run_id, name=spec.name, started=clock.now(), cwd=str(cwd), checks=checks)
    return conduct(
        spec,
        start,
        lambda: RunDir.create(run_dir if run_dir is not None else runs_directory(os.environ) / run_id),
        verbose=verbose,
        faults=faults,
        detachment=detachment,
    )


def conduct(
    spec: ClusterSpec,
    start: RunStart,
    open_folder: Callable[[], RunDir],
    *,
    verbose: bool,
    faults: Sequence[Fault] = (),
    detachment: Detachment | None = None,
    history: History = NO_HISTORY,
    prepare: Callable[[Planner, Console], AttemptSetup | None] = lambda _planner, _console: None,
) -> RunReport:
    """Runs the cluster to its end as its controller; see `run`.

    Args:
        spec: what to run.
        start: what is known of the run; its socket is opened here.
        open_folder: makes or finds the run's folder.
        verbose: as for `run`.
        faults: as for `run`.
        detachment: as for `run`.
        history: what earlier controllers have done.
        prepare: called before the start; returns the attempt that is under way, if one is to be taken over.
    """
    targets = find_targets(spec)
    interrupts = Interrupts()
    interrupts.install()  # before other processes can see the run and signal it
    try:
        files = open_folder()
        tasks = [task for _, task in spec.placements()]
        with (
            contextlib.closing(ControlServer()) as control,
            files.hold(replace(start, socket=control.path)) as journal,
            _reporting_failure(files, start, journal, history),
            _opened_console(tasks, interrupts, journal, verbose=verbose, needed=detachment is None) as console,
        ):
            answers = Answers(start, files, journal, interrupts)
            control.serve(answers)
            planner = _make_planner(spec, targets, files, start.cwd)
            files.write_text(files.spec, render_spec(planner.spec))
            verb = "Resuming" if start.generation else "Starting"
            console.note(f"{verb} {_render_size(planner)}; logs in {files.root}")
            taken_over = prepare(planner, console)
            _make_folders(planner.spec, files)
            bundle = _make_bundle(planner.spec, start.cwd, interrupts)
            context = _make_context(planner.spec, start, files, targets, console, journal, bundle=bundle)
            if detachment is not None:
                context = replace(context, on_up=functools.partial(detachment.leave, console, files.root))
            relist = Relisting(context, Recovery(planner.spec, start.run_id))
            if start.generation and taken_over is None:
                with interrupts.raising():
                    planner = relist(planner, lambda: True)
            supervisor = Supervisor(
                context,
                planner,
                relist.recovery,
                interrupts,
                relist=relist,
                checks=start.checks,
                faults=faults,
                history=history,
                taken_over=taken_over,
            )
            answers.attach(supervisor, context.links)
            return supervisor.run()
    finally:
        interrupts.mute()


@contextlib.contextmanager
def _reporting_failure(files: RunDir, start: RunStart, journal: Journal, history: History) -> Iterator[None]:
    """Writes a report for a run that could not be started, if possible."""
    try:
        yield
    except (ShownError, TakenOverError):
        raise
    except (Exception, Interruption) as caught:
        error = InterruptionError(caught.signum) if isinstance(caught, Interruption) else caught
        report = make_run_report(
            (),
            earlier=history.earlier,
            run_id=start.run_id,
            name=start.name,
            directory=str(files.root),
            started=start.started,
            ended=clock.now(),
            left={},
            versions=make_versions(()),
            end=end_by_error(error),
        )
        journal.end(report)
        with contextlib.suppress(RunDirectoryError):
            files.write_json(files.report, report.model_dump(mode="json"))
        if error is caught:
            raise
        raise error from None


@contextlib.contextmanager
def _opened_console(
    tasks: Sequence[TaskId], interrupts: Interrupts, journal: Journal, *, verbose: bool = False, needed: bool = True
) -> Iterator[Console]:
    """A console that is closed at the end; a signal then no longer waits for a slow terminal."""
    console = open_console(tasks, verbose=verbose, record=journal.say, needed=needed)
    try:
        yield console
    finally:
        interrupts.deliver_to(lambda _: console.hurry())
        console.close()


def _render_size(planner: Planner) -> str:
    """`2 tasks on 2 nodes`, as the first attempt starts them."""
    tasks = len([*planner.spec.placements()])
    nodes = planner.without_spares().spec.nodes
    where = "this machine" if len(nodes) == 1 and nodes[0].is_local else count_of(len(nodes), "node")
    return f"{count_of(tasks, 'task')} on {where}"


def check(spec: ClusterSpec) -> CheckReport:
    """Checks the nodes as a run does before its start, and starts nothing.

    Raises:
        DistlaunchError: the check failed or was interrupted; nothing is left running.
    """
    spec = know_nodes(spec)
    targets = find_targets(spec)
    interrupts = Interrupts()
    interrupts.install()
    try:
        with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
            files = RunDir(Path(folder))
            cwd = str(current_directory())
            planner = _make_planner(spec, targets, files, cwd)
            first = planner.without_spares()
            _make_folders(planner.spec, files)
            journal = Journal(files.events, clock.now)
            with contextlib.closing(journal), _opened_console([], interrupts, journal) as console:
                start = RunStart(run_id=make_run_id(spec.name), name=spec.name, started=clock.now(), cwd=cwd)
                bundle = _make_bundle(planner.spec, cwd, interrupts)
                context = _make_context(
                    planner.spec, start, files, targets, console, journal, bundle=bundle, only_checks=True
                )
                recovery = Recovery(planner.spec, start.run_id)
                state, preflight = Supervisor(context, planner, recovery, interrupts, checks=True).check()
    except Interruption as interruption:
        raise InterruptionError(interruption.signum) from None
    finally:
        interrupts.restore()
    if state.signal is not None:
        raise InterruptionError(state.signal)
    return make_check_report(first.spec, preflight, state)


def plan_ahead(spec: ClusterSpec, run_dir: Path | None = None) -> LaunchPlan:
    """The plan of a run of the spec, as far as it is known without asking other machines.

    The run's folder is shown as `<run>`, unless the user names one.

    Raises:
        UsageError: a node has no usable configuration, or lacks what the spec asks for.
    """
    spec = know_nodes(spec)
    files = RunDir((run_dir if run_dir is not None else runs_directory(os.environ) / "<run>").absolute())
    here = {LOCAL: NodeFacts(hardware.cores(), tuple(hardware.gpus()))}
    return _make_planner(spec, find_targets(spec), files, str(current_directory())).without_spares().plan(here)


def _make_planner(spec: ClusterSpec, targets: Targets, files: RunDir, cwd: str) -> Planner:
    """A planner with this process's environment and Python."""
    return Planner(place(spec, files), cwd, os.environ, sys.executable, find_addresses(spec, targets))


def _make_folders(spec: ClusterSpec, files: RunDir) -> None:
    """Makes the folders of the run that its tasks expect."""
    if str(files.checkpoints) in (spec.checkpoint_directory, *spec.program.args):
        files.make_checkpoints()


def _make_bundle(spec: ClusterSpec, cwd: str, interrupts: Interrupts) -> Bundle | None:
    """The program's folder, if it is sent to other machines."""
    if spec.sync is None:
        return None
    with interrupts.raising():  # may take minutes; other libraries may turn an interruption into another error
        return make_bundle(spec.sync, Path(cwd))


def _make_context(
    spec: ClusterSpec,
    start: RunStart,
    files: RunDir,
    targets: Targets,
    console: Console,
    journal: Journal,
    *,
    bundle: Bundle | None,
    only_checks: bool = False,
) -> RunContext:
    transports = make_transports(spec, targets, files, start.run_id)
    links = NodeLinks(transports, start.run_id, files, spec.timeouts.lease_s)
    return RunContext(
        run_id=start.run_id,
        generation=start.generation,
        spec=spec,
        files=files,
        links=links,
        console=console,
        journal=journal,
        bundle=bundle,
        only_checks=only_checks,
    )
