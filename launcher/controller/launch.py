"""Starts a run with its folder, transports, console and exporters, and conducts it to its end."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launcher.console.writer import Console
from launcher.controller.answers import Answers
from launcher.controller.assembly import make_context, make_folders, make_planner, opened_console
from launcher.controller.context import AttemptSetup, RunContext
from launcher.controller.detach import Detachment
from launcher.controller.goodput import GoodputWatch, watch_goodput
from launcher.controller.live import keys_taken, show_run
from launcher.controller.nodes import Recovery, Relisting
from launcher.controller.supervisor import Supervisor
from launcher.controller.task_input import open_input
from launcher.errors import InterruptionError, RunDirectoryError, ShownError, StartError, TakenOverError
from launcher.exporters.page_writing import write_at_end
from launcher.exporters.start import Exporters, opened_exporters
from launcher.gang.faults import Fault
from launcher.plan.making import make_plan, program_of, runs_in
from launcher.plan.planner import Planner
from launcher.plan.rendering import render_spec
from launcher.plan.resources import NodeFacts
from launcher.report.models import RunReport
from launcher.report.run_report import end_by_error, make_run_report, make_versions
from launcher.rundir.control import ControlServer
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.history import NO_HISTORY, History
from launcher.rundir.journal import Journal
from launcher.rundir.names import choose_folder, current_command, current_directory, make_job_folder, make_run_id
from launcher.signals import Interruption, Interrupts
from launcher.slurm.allocation import find_job
from launcher.sources.base import NodeSource
from launcher.sources.node_list import with_nodes
from launcher.sources.opening import opened_source
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM, NodeSpec
from launcher.transports.agent_process import EarlyAgent
from launcher.transports.targets import Targets, find_targets
from launcher.wording import count_of
from worker_entry.program.finding import find_problem
from worker_entry.protocol.frozen import dataclass, replace
from worker_entry.system import clock, hardware

MANY_NODES = 100
LONG_TURN_S = 0.05
"""Ten times Python's own `sys.getswitchinterval()`."""
OF_FILES = ("no-working-directory", "no-program", "not-executable")
"""Problems that do not depend on the interpreter."""


def run(
    spec: ClusterSpec,
    *,
    run_dir: Path | None,
    verbose: bool,
    checks: bool,
    live: bool = False,
    faults: Sequence[Fault] = (),
    detachment: Detachment | None = None,
    stdin: int | None = None,
    early: EarlyAgent | None = None,
) -> RunReport:
    """Runs the cluster to its end.

    Args:
        spec: what to run.
        run_dir: the folder for the run's files; by default a new one in the user's state directory.
        verbose: whether the console shows TensorFlow's start-up messages.
        checks: whether the nodes are checked before the start.
        live: whether the console shows the live view if it is a terminal.
        faults: the faults to inject.
        detachment: leaves the terminal, if the run can.
        stdin: the descriptor from which tasks read, and which is closed here; None: they read nothing.
        early: an agent on this machine that the run uses if it can, and that the caller ends.

    Raises:
        DistlaunchError: the cluster could not be started; nothing is left running.
        ShownError: an error ended the started cluster; the report is written.
    """
    clock.share()
    spec = with_nodes(spec)
    start = new_start(spec, checks=checks, command=current_command(), run_id=early.run_id if early is not None else "")
    return conduct(
        spec,
        start,
        lambda: RunDir.create(choose_folder(run_dir, make_job_folder(start.job) if start.job else start.run_id)),
        verbose=verbose,
        live=live,
        faults=faults,
        detachment=detachment,
        stdin=stdin,
        early=early,
    )


def new_start(spec: ClusterSpec, *, checks: bool, command: str = "", run_id: str = "") -> RunStart:
    """The facts about a new run; `run_id`: its id, if it has one already.

    Raises:
        UsageError: the run cannot start on this machine; nothing is written.
    """
    cwd = current_directory()
    check_start(spec, cwd)
    job = find_job(os.environ) if spec.source == SLURM else ""
    run_id = run_id or make_run_id(spec.name)
    return RunStart(
        run_id=run_id, name=spec.name, started=clock.now(), cwd=str(cwd), checks=checks, command=command, job=job
    )


Prepare = Callable[[Planner, Console, Interrupts], AttemptSetup | None]


def prepare_nothing(_planner: Planner, _console: Console, _interrupts: Interrupts) -> AttemptSetup | None:
    """For a run that starts: there is no attempt to take over."""
    return None


def conduct(
    spec: ClusterSpec,
    start: RunStart,
    open_folder: Callable[[], RunDir],
    *,
    verbose: bool,
    live: bool = False,
    faults: Sequence[Fault] = (),
    detachment: Detachment | None = None,
    history: History = NO_HISTORY,
    prepare: Prepare = prepare_nothing,
    stdin: int | None = None,
    early: EarlyAgent | None = None,
) -> RunReport:
    """Runs the cluster to its end as its controller; see `run`.

    Args:
        spec: what to run.
        start: the facts about the run; its socket is opened here.
        open_folder: makes or finds the run's folder.
        verbose: as for `run`.
        live: as for `run`.
        faults: as for `run`.
        detachment: as for `run`.
        history: the history of the run under earlier controllers.
        prepare: called before the start; returns the running attempt to take over, if any.
        stdin: as for `run`.
        early: as for `run`.
    """
    targets = find_targets(spec, early)
    interrupts = Interrupts()
    interrupts.install()  # before other processes can see the run and signal it
    try:
        with _opened_run(
            spec, start, targets, interrupts, open_folder, history, verbose=verbose, live=live, detachment=detachment
        ) as run:
            planner = _plan(run)
            taken_over = prepare(planner, run.console, interrupts)
            context = _make_context(run, planner, detachment, stdin)
            relist = Relisting(context, Recovery(planner.spec, start.run_id))
            planner = _choose_nodes(run, planner, relist, is_taken_over=taken_over is not None)
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
            run.answers.attach(supervisor, context.links)
            run.exporters.attach(planner.spec, context.links)
            report = supervisor.run()
            run.journal.waits = supervisor.continues_later and run.source.will_return(run.console.note)
        if run.journal.waits:
            run.source.requeue()  # may end this process
        return report
    finally:
        interrupts.mute()


@dataclass(frozen=True, kw_only=True)
class _OpenRun:
    """A run that other processes can see and stop: its folder, journal, console and exporters are open."""

    spec: ClusterSpec
    start: RunStart
    targets: Targets
    interrupts: Interrupts
    files: RunDir
    journal: Journal
    console: Console
    exporters: Exporters
    source: NodeSource
    goodput: GoodputWatch
    answers: Answers


@contextlib.contextmanager
def _opened_run(
    spec: ClusterSpec,
    start: RunStart,
    targets: Targets,
    interrupts: Interrupts,
    open_folder: Callable[[], RunDir],
    history: History,
    *,
    verbose: bool,
    live: bool,
    detachment: Detachment | None,
) -> Iterator[_OpenRun]:
    """Opens all that the run needs before its nodes, and closes it at the end, the folder last."""
    tasks = [task for _, task in spec.placements()]
    needed = detachment is None or not detachment.is_background
    with (
        _long_switch_interval(len(spec.nodes)),
        opened_exporters(spec, start.cwd) as exporters,
        contextlib.nullcontext(open_folder()) as files,
        contextlib.closing(ControlServer()) as control,
        files.hold(replace(start, socket=control.path)) as journal,
        reporting_failure(files, start, journal, history, page=spec.report),
        opened_console(tasks, interrupts, journal, verbose=verbose, needed=needed, live=live) as console,
        keys_taken(console, interrupts, files.root, detachment),
        exporters.warning_at(console),
        opened_source(spec, run_id=start.run_id, cwd=start.cwd, connectors=targets.values, warn=console.warn) as source,
    ):
        goodput = watch_goodput(files, journal, start.started, spec)
        answers = Answers(start, files, journal, interrupts, goodput)
        exporters.begin(answers.make_status, journal)
        show_run(console, answers.make_status)
        control.serve(answers)
        yield _OpenRun(
            spec=spec,
            start=start,
            targets=targets,
            interrupts=interrupts,
            files=files,
            journal=journal,
            console=console,
            exporters=exporters,
            source=source,
            goodput=goodput,
            answers=answers,
        )


def _plan(run: _OpenRun) -> Planner:
    """Plans the run for the nodes that its spec names, and records the spec."""
    planner = make_planner(run.spec, run.targets, run.files, run.start.cwd)
    run.files.write_text(run.files.spec, render_spec(planner.spec))
    verb = "Resuming" if run.start.generation else "Starting"
    run.console.note(f"{verb} {_render_size(planner)}; logs in {run.files.root}")
    return planner


def _make_context(run: _OpenRun, planner: Planner, detachment: Detachment | None, stdin: int | None) -> RunContext:
    """The context of all attempts."""
    make_folders(planner.spec, run.files)
    context = make_context(
        spec=planner.spec,
        start=run.start,
        files=run.files,
        targets=run.targets,
        console=run.console,
        journal=run.journal,
        goodput=run.goodput,
        interrupts=run.interrupts,
        source=run.source,
    )
    context = replace(context, input=open_input(run.files, stdin, context.links.put, run.console.warn))
    if detachment is None or not detachment.is_background:
        return context
    return replace(context, depart=lambda state: detachment.note(state, clock.now(), run.console, run.files.root))


def _choose_nodes(run: _OpenRun, planner: Planner, relist: Relisting, *, is_taken_over: bool) -> Planner:
    """The planner for the current nodes; for a running attempt, the same planner."""
    for finding in run.source.find_problems(run.spec, run.start.cwd):
        run.console.warn(f"{finding.message} [{finding.reference}]")
    if is_taken_over:
        run.source.keep([node.host for node in planner.spec.nodes])
        return planner
    if run.source.is_lazy:
        with run.interrupts.raising():
            return relist(planner, lambda: True)
    if run.start.generation:
        return relist(planner, lambda: run.interrupts.asked is None)  # the supervisor handles such a signal
    return planner


@contextlib.contextmanager
def _long_switch_interval(nodes: int) -> Iterator[None]:
    """With many nodes, lets each thread run longer before another thread may take its turn.

    Each waiting thread wakes up after that time: with two threads per node, these wake-ups took a quarter of the CPU
    time to start 1,000 nodes.
    """
    before = sys.getswitchinterval()
    if nodes > MANY_NODES:
        sys.setswitchinterval(LONG_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def reporting_failure(
    files: RunDir,
    start: RunStart,
    journal: Journal,
    history: History,
    *,
    page: bool,
    now: Callable[[], float] = clock.now,
) -> Iterator[None]:
    """Writes a report for a run that could not be started, if possible. `now`: Unix seconds."""
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
            ended=now(),
            left={},
            versions=make_versions(()),
            end=end_by_error(error),
        )
        journal.end(report)
        with contextlib.suppress(RunDirectoryError):
            files.write_json(files.report, report.model_dump(mode="json"))
        if page:
            write_at_end(files, report, functools.partial(journal.say, "warning"))
        if error is caught:
            raise
        raise error from None


def _render_size(planner: Planner) -> str:
    """`2 tasks on 2 nodes`, as the first attempt starts them."""
    tasks = len([*planner.spec.placements()])
    nodes = planner.without_spares().spec.nodes
    where = "this machine" if len(nodes) == 1 and nodes[0].is_local else count_of(len(nodes), "node")
    return f"{count_of(tasks, 'task')} on {where}"


def check_start(spec: ClusterSpec, cwd: Path) -> None:
    """Checks the program and the GPUs on this machine before the run has a folder, as its agent does later.

    Args:
        spec: what to run.
        cwd: the current folder.

    Raises:
        StartError: the program cannot be started here.
        TooFewGpusError: this machine lacks GPUs that the spec asks for.
    """
    here = [node for node in spec.nodes if node.is_local and any(node.tasks.values())]
    for node in here:
        _check_program(spec, node, cwd)
    if any(node.gpus_per_worker for node in here):
        facts = {node.host: NodeFacts(hardware.cores(), tuple(hardware.gpus())) for node in here}
        make_plan(spec, directory=str(cwd), environ={}, python="", facts=facts)


def _check_program(spec: ClusterSpec, node: NodeSpec, cwd: Path) -> None:
    types = {task_type for task_type, count in node.tasks.items() if count}
    if types <= {*spec.rules.serves}:  # they run our own server
        return
    problem = find_problem(program_of(spec), runs_in(spec, node, str(cwd)))
    # Another interpreter may have another syntax, and other packages.
    if problem is not None and (problem.reference in OF_FILES or spec.find_python(node) == sys.executable):
        raise StartError(problem.reference, problem.message, hint=problem.hint)
