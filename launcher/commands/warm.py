"""`distlaunch down --warm`: stops the agents that wait for another run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.errors import RunDirectoryError, UsageError
from launcher.rundir.directory import RunDir
from launcher.rundir.record import RecordedRun
from launcher.rundir.select import verify_own
from launcher.rundir.warm_nodes import find_warm_nodes, forget
from launcher.tasks import LOCAL
from launcher.transports.node_cleanup import CleanedNode, end_warm
from worker_entry.agent.warm.offer import end_waiting


def end_all() -> Iterator[CleanedNode]:
    """Stops all agents that wait for another run."""
    for host, node in {node.node: node for node in find_warm_nodes()}.items():
        if host == LOCAL:
            ended, left = end_waiting()
            yield CleanedNode(host, ended, tuple(left))
            continue
        try:
            spec = RecordedRun(verify_own(RunDir(Path(node.run)))).parse_spec()
            place = next(each for each in spec.nodes if each.host == host)
        except UsageError as error:
            yield CleanedNode(host, problem=error.message)
            continue
        except (RunDirectoryError, StopIteration):
            yield CleanedNode(host, problem=f"the folder of its run is gone: {node.run}; its agent ends by itself")
            continue
        cleaned = end_warm(spec, place)
        if cleaned.ok:
            forget(host)
        yield cleaned
