"""For `distlaunch ls` and `down --warm`: the nodes on which agents wait for another run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.controller.leftovers import KnownWarmNode, find_warm_nodes, forget
from launcher.errors import UsageError
from launcher.printable import printable
from launcher.report.table import Column, render_table
from launcher.rundir.directory import RunDir
from launcher.rundir.select import verify_own
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import LOCAL
from launcher.transports.node_cleanup import CleanedNode, end_warm
from launcher.wording import render_age
from worker_entry.agent.warm.offer import end_waiting
from worker_entry.protocol.units import render_size

COLUMNS = (Column("WARM NODE", 90), Column("MEMORY", 20), Column("ENDS IN", 60))


def render_warm(nodes: Sequence[KnownWarmNode], now: float, room: int | None) -> list[str]:
    """A table; `room`: its width, None for no limit."""
    return render_table(COLUMNS, [_row(node, now) for node in nodes], room)


def _row(node: KnownWarmNode, now: float) -> tuple[str, ...]:
    name = "this machine" if node.node == LOCAL else printable(node.node)
    return name, render_size(node.bytes), render_age(node.until - now)


def end_all() -> Iterator[CleanedNode]:
    """Stops all agents that wait for another run."""
    for host, node in {node.node: node for node in find_warm_nodes()}.items():
        if host == LOCAL:
            ended, left = end_waiting()
            yield CleanedNode(host, ended, tuple(left))
            continue
        try:
            spec = ClusterSpec.model_validate_json(verify_own(RunDir(Path(node.run))).spec.read_bytes())
            place = next(each for each in spec.nodes if each.host == host)
        except UsageError as error:
            yield CleanedNode(host, problem=error.message)
            continue
        except (OSError, ValueError, StopIteration):
            yield CleanedNode(host, problem=f"the folder of its run is gone: {node.run}; its agent ends by itself")
            continue
        cleaned = end_warm(spec, place)
        if cleaned.ok:
            forget(host)
        yield cleaned
