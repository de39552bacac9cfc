"""Checks the nodes of a spec, and plans its run, without starting tasks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from launcher.controller.assembly import make_context, make_folders, make_planner, opened_console
from launcher.controller.goodput import watch_goodput
from launcher.controller.nodes import Recovery, Relisting
from launcher.controller.supervisor import Supervisor
from launcher.errors import InterruptionError
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.resources import NodeFacts
from launcher.report.check_report import make_check_report
from launcher.report.models import CheckReport
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.journal import Journal
from launcher.rundir.names import choose_folder, current_directory, make_run_id
from launcher.signals import Interruption, Interrupts
from launcher.slurm.allocation import find_job
from launcher.sources.node_list import with_nodes
from launcher.sources.opening import opened_source
from launcher.sources.slurm import ask_job, find_job_problems, find_program_problems
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM
from launcher.tasks import LOCAL
from launcher.transports.targets import find_targets
from worker_entry.system import clock, hardware


def check(spec: ClusterSpec, *, examines: bool = False) -> CheckReport:
    """Checks the nodes as a run does before its start, and starts nothing.

    Args:
        spec: the spec.
        examines: whether the report also has `facts` about each machine.

    Raises:
        DistlaunchError: the check failed or was interrupted; no process is left running.
    """
    spec = with_nodes(spec)
    targets = find_targets(spec)
    interrupts = Interrupts()
    interrupts.install()
    try:
        with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
            files = RunDir(Path(folder))
            cwd = str(current_directory())
            planner = make_planner(spec, targets, files, cwd)
            first = planner.without_spares()
            make_folders(planner.spec, files)
            journal = Journal(files.events, clock.now)
            start = RunStart(run_id=make_run_id(spec.name), name=spec.name, started=clock.now(), cwd=cwd)
            with (
                contextlib.closing(journal),
                opened_console([], interrupts, journal) as console,
                opened_source(
                    spec, run_id=start.run_id, cwd=cwd, connectors=targets.values, warn=console.warn
                ) as source,
            ):
                goodput = watch_goodput(files, journal, start.started, planner.spec)
                context = make_context(
                    spec=planner.spec,
                    start=start,
                    files=files,
                    targets=targets,
                    console=console,
                    journal=journal,
                    goodput=goodput,
                    interrupts=interrupts,
                    source=source,
                    only_checks=True,
                    examines=examines,
                )
                recovery = Recovery(planner.spec, start.run_id)
                if source.is_lazy:
                    with interrupts.raising():
                        planner = Relisting(context, recovery)(planner, lambda: True)
                    first = planner
                state, preflight = Supervisor(context, planner, recovery, interrupts, checks=True).check()
    except Interruption as interruption:
        raise InterruptionError(interruption.signum) from None
    finally:
        interrupts.restore()
    if state.signal is not None:
        raise InterruptionError(state.signal)
    if spec.source != SLURM:
        return make_check_report(first.spec, preflight, state)
    job = find_job(os.environ)
    report = ask_job(job)
    more = [*find_program_problems(spec, cwd), *find_job_problems(spec, job, report)]
    return make_check_report(first.spec, preflight, state, job=report, more=more)


def plan_ahead(spec: ClusterSpec, run_dir: Path | None = None) -> LaunchPlan:
    """The plan of a run of the spec, as far as this machine knows it without asking other nodes.

    The run's folder is shown as `<run>`, unless the user names one.

    Raises:
        UsageError: a node has no usable configuration, or lacks a resource that the spec asks for.
    """
    spec = with_nodes(spec)
    files = RunDir(choose_folder(run_dir, "<run>").absolute())
    here = {LOCAL: NodeFacts(hardware.cores(), tuple(hardware.gpus()))}
    return make_planner(spec, find_targets(spec), files, str(current_directory())).without_spares().plan(here)
