"""Assembles a run from its folder, transports and console, and runs it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.console.writer import Console, open_console
from launcher.errors import InterruptionError, RunDirectoryError, ShownError
from launcher.gang.faults import Fault
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.planner import Planner, place
from launcher.plan.rendering import render_spec
from launcher.plan.resources import NodeFacts
from launcher.report.check_report import make_check_report
from launcher.report.models import CheckReport, RunReport
from launcher.report.run_report import end_by_error, make_run_report, make_versions
from launcher.run.context import RunContext
from launcher.run.directory import RunDir
from launcher.run.interrupts import Interruption, Interrupts
from launcher.run.naming import current_directory, make_run_id, runs_directory
from launcher.run.node_links import NodeLinks
from launcher.run.supervisor import Supervisor
from launcher.run.sync import make_bundle
from launcher.spec.models import LOCAL, ClusterSpec
from launcher.transports.node_cleanup import clean_node
from launcher.transports.targets import Targets, find_addresses, find_targets, make_transport
from launcher.wording import count_of
from worker_entry.system import clock, hardware


def run(
    spec: ClusterSpec, *, run_dir: Path | None, verbose: bool, checks: bool, faults: Sequence[Fault] = ()
) -> RunReport:
    """Runs the cluster to its end.

    Args:
        spec: what to run.
        run_dir: the folder for the run's files; by default a new one in the user's state directory.
        verbose: whether the console shows TensorFlow's start-up messages.
        checks: whether the nodes are checked before the start.
        faults: what is injected into it.

    Raises:
        DistlaunchError: the cluster could not be started; nothing is left running.
        ShownError: an error ended the started cluster; the report is written.
    """
    clock.share()
    current_directory()  # where this machine's tasks run; fails before anything is written
    targets = find_targets(spec)
    run_id = make_run_id(spec.name)
    interrupts = Interrupts()
    interrupts.install()  # before other processes can see the run and signal it
    try:
        files = RunDir.create(run_dir if run_dir is not None else runs_directory(os.environ) / run_id)
        with files.hold(run_id), _reporting_failure(files, run_id, spec.name):
            console = open_console([task for _, task in spec.placements()], verbose=verbose)
            try:
                supervisor = _prepare(
                    spec,
                    run_id=run_id,
                    files=files,
                    targets=targets,
                    console=console,
                    interrupts=interrupts,
                    checks=checks,
                    faults=faults,
                )
                return supervisor.run()
            finally:
                interrupts.deliver_to(lambda _: console.hurry())
                console.close()
    finally:
        interrupts.mute()


@contextlib.contextmanager
def _reporting_failure(files: RunDir, run_id: str, name: str) -> Iterator[None]:
    """Writes a report for a run that could not be started, if possible."""
    started = clock.now()
    try:
        yield
    except ShownError:
        raise
    except (Exception, Interruption) as caught:
        error = InterruptionError(caught.signum) if isinstance(caught, Interruption) else caught
        report = make_run_report(
            (),
            run_id=run_id,
            name=name,
            directory=str(files.root),
            started=started,
            ended=clock.now(),
            left={},
            versions=make_versions(()),
            end=end_by_error(error),
        )
        with contextlib.suppress(RunDirectoryError):
            files.write_json(files.report, report.model_dump(mode="json"))
        if error is caught:
            raise
        raise error from None


def _prepare(
    spec: ClusterSpec,
    *,
    run_id: str,
    files: RunDir,
    targets: Targets,
    console: Console,
    interrupts: Interrupts,
    checks: bool,
    faults: Sequence[Fault],
) -> Supervisor:
    """Does everything before the first connection; slow if a large folder is to be sent."""
    planner = _make_planner(spec, targets, files)
    spec, first = planner.spec, planner.without_spares()
    files.write_text(files.spec, render_spec(spec))
    tasks = [task for _, task in spec.placements()]
    nodes = first.spec.nodes
    where = "this machine" if len(nodes) == 1 and nodes[0].is_local else count_of(len(nodes), "node")
    console.note(f"Starting {count_of(len(tasks), 'task')} on {where}; logs in {files.root}")
    _make_folders(spec, files)
    return _make_supervisor(
        planner,
        run_id=run_id,
        files=files,
        targets=targets,
        console=console,
        interrupts=interrupts,
        checks=checks,
        faults=faults,
    )


def check(spec: ClusterSpec) -> CheckReport:
    """Checks the nodes as a run does before its start, and starts nothing.

    Raises:
        DistlaunchError: the check failed or was interrupted; nothing is left running.
    """
    targets = find_targets(spec)
    interrupts = Interrupts()
    interrupts.install()
    try:
        with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
            files = RunDir(Path(folder))
            planner = _make_planner(spec, targets, files)
            first = planner.without_spares()
            _make_folders(planner.spec, files)
            console = open_console([], verbose=False)
            try:
                run_id = make_run_id(spec.name)
                supervisor = _make_supervisor(
                    planner,
                    run_id=run_id,
                    files=files,
                    targets=targets,
                    console=console,
                    interrupts=interrupts,
                    checks=True,
                    only_checks=True,
                )
                state, preflight = supervisor.check()
            finally:
                interrupts.deliver_to(lambda _: console.hurry())
                console.close()
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
    files = RunDir((run_dir if run_dir is not None else runs_directory(os.environ) / "<run>").absolute())
    here = {LOCAL: NodeFacts(hardware.cores(), tuple(hardware.gpus()))}
    return _make_planner(spec, find_targets(spec), files).without_spares().plan(here)


def _make_planner(spec: ClusterSpec, targets: Targets, files: RunDir) -> Planner:
    """A planner with this process's folder, environment and Python."""
    return Planner(
        place(spec, files), str(current_directory()), os.environ, sys.executable, find_addresses(spec, targets)
    )


def _make_folders(spec: ClusterSpec, files: RunDir) -> None:
    """Makes the folders of the run that its tasks expect."""
    if str(files.checkpoints) in (spec.checkpoint_directory, *spec.program.args):
        files.make_checkpoints()


def _make_supervisor(
    planner: Planner,
    *,
    run_id: str,
    files: RunDir,
    targets: Targets,
    console: Console,
    interrupts: Interrupts,
    checks: bool,
    only_checks: bool = False,
    faults: Sequence[Fault] = (),
) -> Supervisor:
    spec = planner.spec

    def recover(host: str, reattach_folder: str) -> bool:
        return clean_node(spec, next(node for node in spec.nodes if node.host == host), [run_id], reattach_folder).good

    bundle = None
    if spec.sync is not None:
        with interrupts.raising():  # may take minutes; other libraries may turn an interruption into another error
            bundle = make_bundle(spec.sync, current_directory())
    transports = {node.host: make_transport(spec, node, targets[node.host], files, run_id) for node in spec.nodes}
    context = RunContext(
        run_id=run_id,
        spec=spec,
        files=files,
        links=NodeLinks(transports, run_id, files, spec.timeouts.lease_s),
        console=console,
        bundle=bundle,
        only_checks=only_checks,
    )
    return Supervisor(context, planner, recover, interrupts, checks=checks, faults=faults)
