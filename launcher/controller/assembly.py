"""Builds the parts of a run from its folder, its spec and this process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.console.opening import open_console
from launcher.console.writer import Console
from launcher.controller.bundle import Bundle, make_bundle
from launcher.controller.collect.collector import Collector
from launcher.controller.context import RunContext
from launcher.controller.goodput import GoodputWatch
from launcher.controller.links import NodeLinks
from launcher.controller.nodes import make_transports
from launcher.exporters.page_writing import write_at_end
from launcher.plan.planner import Planner, fill_in_folders
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.journal import Journal
from launcher.signals import Interrupts
from launcher.sources.base import NodeSource
from launcher.spec.models import ClusterSpec
from launcher.tasks import TaskId
from launcher.transports.targets import Targets, find_addresses


@contextlib.contextmanager
def opened_console(
    tasks: Sequence[TaskId],
    interrupts: Interrupts,
    journal: Journal,
    *,
    verbose: bool = False,
    needed: bool = True,
    live: bool = False,
) -> Iterator[Console]:
    """Yields a console and closes it at the end; a signal stops it from waiting for a slow terminal."""
    console = open_console(tasks, verbose=verbose, record=journal.say, needed=needed, live=live)
    try:
        yield console
    finally:
        interrupts.deliver_to(lambda _signum, _is_request: console.hurry())
        console.close()


def make_planner(spec: ClusterSpec, targets: Targets, files: RunDir, cwd: str) -> Planner:
    """A planner with this process's environment and Python."""
    return Planner(fill_in_folders(spec, files), cwd, os.environ, sys.executable, find_addresses(spec, targets))


def make_folders(spec: ClusterSpec, files: RunDir) -> None:
    """Makes the folders of the run that its tasks expect."""
    if str(files.checkpoints) in (spec.checkpoint_directory, *spec.program.args):
        files.make_checkpoints()


def _make_bundle_of(spec: ClusterSpec, cwd: str, interrupts: Interrupts) -> Bundle | None:
    """Bundles the program's folder if the spec syncs it to other nodes."""
    if spec.sync is None:
        return None
    with interrupts.raising():  # may take minutes
        return make_bundle(spec.sync, Path(cwd))


def make_context(
    *,
    spec: ClusterSpec,
    start: RunStart,
    files: RunDir,
    targets: Targets,
    console: Console,
    journal: Journal,
    goodput: GoodputWatch,
    interrupts: Interrupts,
    source: NodeSource,
    only_checks: bool = False,
    examines: bool = False,
) -> RunContext:
    bundle = _make_bundle_of(spec, start.cwd, interrupts)
    transports = make_transports(spec, targets, files, start.run_id)
    links = NodeLinks(
        transports,
        start.run_id,
        files,
        spec.timeouts.lease_s,
        sample_s=spec.sample_every_s,
        isolated=spec.isolation != "none",
        keep_warm_s=0.0 if only_checks else spec.keep_warm_s,
    )
    return RunContext(
        run_id=start.run_id,
        generation=start.generation,
        spec=spec,
        files=files,
        links=links,
        console=console,
        journal=journal,
        started=start.started,
        goodput=goodput,
        collector=Collector(spec, files, links, start.started, console.warn),
        bundle=bundle,
        source=source,
        only_checks=only_checks,
        examines=examines,
        write_page=lambda report: write_at_end(files, report, console.warn) if spec.report else "",
    )
