"""`distlaunch clean`: stops leftover processes of runs whose controller is gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError
from launcher.kubernetes.calls import Kubectl
from launcher.kubernetes.job import JOB_NAME_LENGTH
from launcher.kubernetes.pod import make_name
from launcher.rundir.directory import RunDir
from launcher.rundir.names import runs_directory
from launcher.rundir.record import RecordedRun
from launcher.rundir.select import select_run
from launcher.sources.node_list import with_nodes
from launcher.sources.pods import remove_pods
from launcher.spec.loading import load_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.pods import PodsSpec
from launcher.transports.node_cleanup import CleanedNode, clean_node

NODES_AT_ONCE = 32


def clean(what: str) -> Iterator[CleanedNode]:
    """Cleans the nodes of a run, or of a spec.

    Args:
        what: a run's name, a part of it, or its folder; or a spec file, for all ended runs that this user started on
            this machine.

    Raises:
        DistlaunchError: there is no such run or spec, or the run is still running.
    """
    spec, run_ids = _find(what)
    if isinstance(spec.source, PodsSpec):
        yield from (_clean_pods(spec.source, run_id) for run_id in run_ids)
        return
    with ThreadPoolExecutor(max_workers=NODES_AT_ONCE) as pool:
        yield from pool.map(lambda node: clean_node(spec, node, run_ids), spec.nodes)


def _clean_pods(source: PodsSpec, run_id: str) -> CleanedNode:
    """Removes the leftover pods of a run."""
    left = remove_pods(Kubectl(source.context, source.namespace), make_name(run_id, JOB_NAME_LENGTH))
    return CleanedNode(
        f"pods of {run_id}", problem="" if left == 0 else "Kubernetes still has them, or does not answer"
    )


def _find(what: str) -> tuple[ClusterSpec, list[str]]:
    if _is_spec_file(what):
        return with_nodes(load_spec(Path(what), os.environ)), [*_ended_runs(runs_directory(os.environ))]
    files = select_run(what)
    run_id, controller = files.read_run()
    if controller is not None:
        raise UsageError(
            f"run {run_id} is still running (pid {controller.pid})", hint="stop it with Ctrl-C or `distlaunch down`"
        )
    return RecordedRun(files).parse_spec(), [run_id]


def _is_spec_file(what: str) -> bool:
    """A spec file has a slash or a suffix; a name without both is a run's, whatever the current folder contains."""
    return ("/" in what or Path(what).suffix in (".yaml", ".yml", ".json")) and Path(what).is_file()


def _ended_runs(runs: Path) -> Iterator[str]:
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        try:
            run_id, controller = RunDir(folder).read_run()
        except (RunDirectoryError, UsageError):  # not a run, or it may be running on another machine
            continue
        if controller is None:
            yield run_id
