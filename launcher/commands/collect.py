"""`distlaunch collect`: brings the files that tasks have written to the run's folder, during the run or after it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.commands.requests import ask_files
from launcher.controller.collect.collector import Collector
from launcher.controller.collection_wait import Progress, await_files
from launcher.controller.links import NodeLinks
from launcher.controller.nodes import make_transports
from launcher.errors import RunDirectoryError, UsageError
from launcher.plan.making import runs_in
from launcher.report.models import CollectedNode
from launcher.rundir.directory import RunDir
from launcher.rundir.last_state import read_end_report
from launcher.rundir.names import make_run_id, name_run
from launcher.rundir.record import RecordedRun, RunRecord, read_record
from launcher.rundir.select import verify_own
from launcher.rundir.summary import summarize
from launcher.spec.models import ClusterSpec
from launcher.spec.pods import PodsSpec
from launcher.tasks import find_leader
from launcher.transports.base import LinkClosed
from launcher.transports.targets import find_targets
from worker_entry.protocol.messages import Ready

ASK_S = 0.5
SHOW_S = 2.0
"""How often the progress is shown."""


def collect(files: RunDir, patterns: Sequence[str], show: Callable[[str], None]) -> list[CollectedNode]:
    """Brings the files of all nodes; what is already here is not fetched again.

    Args:
        files: the run's folder.
        patterns: which files; empty: those of the spec.
        show: shows the progress.

    Returns:
        What was collected, by node.

    Raises:
        DistlaunchError: nothing could be collected.
    """
    verify_own(files)
    record = read_record(files)
    if record.waits:
        raise UsageError(f"run {record.run_id} waits for its job, and has written nothing yet")
    if files.read_run()[1] is not None:
        collected = _collect_running(files, patterns, show)
        if collected is not None:
            return collected
        record = read_record(files)
    return _collect_ended(files, record, patterns, show)


def _collect_running(files: RunDir, patterns: Sequence[str], show: Callable[[str], None]) -> list[CollectedNode] | None:
    """Has the run's controller collect; None if it ends meanwhile."""
    collection = ask_files(files, begins=True, patterns=patterns)
    progress = Progress(show, SHOW_S, time.monotonic)
    while not collection.is_over:
        progress.note(collection.progress)
        time.sleep(ASK_S)
        if files.read_run()[1] is None:
            return None
        try:
            collection = ask_files(files)
        except UsageError:
            if files.read_run()[1] is not None:
                raise
            return None
    return collection.nodes


def _collect_ended(
    files: RunDir, record: RunRecord, patterns: Sequence[str], show: Callable[[str], None]
) -> list[CollectedNode]:
    """Starts an agent on each node, which sends the files."""
    spec = RecordedRun(files).parse_spec()
    if patterns:
        spec = spec.changed(collect=[*patterns])
    if not spec.collect:
        raise UsageError(
            "the spec of the run has no `collect`",
            hint=f"name the files: `distlaunch collect {name_run(files.root)} 'models/'`",
        )
    if isinstance(spec.source, PodsSpec):
        raise UsageError("the pods of the run are gone, with all files that are on no volume")
    directories = _find_directories(files, spec, record.cwd)
    spec = spec.with_nodes([node for node in spec.nodes if node.host in directories])
    with tempfile.TemporaryDirectory(prefix="distlaunch-") as folder:
        run_id, own = make_run_id(spec.name), RunDir(Path(folder))
        links = NodeLinks(make_transports(spec, find_targets(spec), own, run_id), run_id, own, spec.timeouts.lease_s)
        try:
            collector = Collector(spec, files, links, record.started, show)
            _connect(links, collector, directories)
            collector.begin(dict.fromkeys(directories, ""))
            progress = Progress(show, SHOW_S, time.monotonic)

            def goes_on() -> bool:
                progress.note(collector.render_progress())
                return True

            await_files(collector, links, goes_on)
            collector.close()
        finally:
            links.close()
    collected = collector.make_report()
    _note(files, collected)
    return collected


def _connect(links: NodeLinks, collector: Collector, directories: Mapping[str, str]) -> None:
    """Starts the agents; waits until each has answered or failed."""
    links.begin(0, dict.fromkeys(directories, ()))
    awaited = set(directories)
    for node, directory in directories.items():
        links.connect(node, directory)
    while awaited:
        incoming = links.next(ASK_S)
        if isinstance(incoming, tuple):
            node, message = incoming
            collector.note(node, message)
            if isinstance(message, (Ready, LinkClosed)):
                awaited.discard(node)


def _find_directories(files: RunDir, spec: ClusterSpec, cwd: str) -> dict[str, str]:
    """Where the tasks of each node ran, the chief's node first."""
    nodes = {task.task: task.node for task in RecordedRun(files).plan.tasks}
    if not nodes:
        raise RunDirectoryError(f"cannot read {files.plan}")
    report = read_end_report(files, summarize(files))
    known = {node.node: node.directory for node in report.collected if node.directory} if report is not None else {}
    leader = find_leader(nodes)
    hosts = sorted(spec.nodes, key=lambda node: node.host != nodes.get(leader) if leader is not None else False)
    return {node.host: known.get(node.host, runs_in(spec, node, cwd)) for node in hosts if node.host in nodes.values()}


def _note(files: RunDir, collected: Sequence[CollectedNode]) -> None:
    """Notes in the report what has come."""
    report = read_end_report(files, summarize(files))
    if report is not None:
        later = report.model_copy(update={"collected": [*collected]})
        files.write_json(files.report, later.model_dump(mode="json"))
