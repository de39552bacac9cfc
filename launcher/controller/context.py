"""The values that the parts of a run share, with the links to its nodes and the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from launcher.clock import Timing
from launcher.console.writer import Console
from launcher.controller.bundle import Bundle
from launcher.controller.collect.collector import Collector
from launcher.controller.goodput import GoodputWatch
from launcher.controller.links import NodeLinks
from launcher.controller.task_input import TaskInput
from launcher.gang.checks.preflight import Preflight
from launcher.gang.state import AttemptState
from launcher.plan.planner import Planner
from launcher.report.models import RunReport
from launcher.rundir.directory import RunDir
from launcher.rundir.history import History
from launcher.rundir.journal import Journal
from launcher.rundir.owner import find_left_processes
from launcher.sources.base import NodeSource
from launcher.spec.models import ClusterSpec
from worker_entry.protocol.frozen import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The context that all attempts of a run share."""

    run_id: str
    spec: ClusterSpec
    """The user's spec, spare nodes included."""
    files: RunDir
    links: NodeLinks
    console: Console
    journal: Journal
    started: float
    """When the run began, in Unix seconds."""
    goodput: GoodputWatch
    generation: int = 0
    """The number of earlier controllers of the run."""
    input: TaskInput | None = None
    """The tasks' input from stdin, if they have one."""
    collector: Collector
    """Collects the files that tasks write, if the spec asks for them."""
    bundle: Bundle | None = None
    """The program's folder, if it is sent to the nodes."""
    source: NodeSource = NodeSource()
    """The source of the nodes, which may also take them away."""
    only_checks: bool = False
    """Whether the nodes are only checked."""
    examines: bool = False
    """Whether the nodes also report facts about their machines."""
    write_page: Callable[[RunReport], str] = lambda _: ""
    """Writes the page of an ended run and returns the page's path; empty if no page is wanted."""
    find_left: Callable[[str], Sequence[int]] = find_left_processes
    """The processes on this machine that belong to a run, independent of its agent."""
    depart: Callable[[AttemptState], None] = lambda _: None
    """Called with each state; lets a run in the background leave its terminal."""

    @property
    def timing(self) -> Timing:
        """The clocks and waits of the links."""
        return self.links.timing


@dataclass(frozen=True, kw_only=True)
class AttemptSetup:
    """The nodes that take part in an attempt, and how they are checked."""

    planner: Planner
    preflight: Preflight | None
    """The checks before the start; None if the nodes are not checked."""
    notes: Sequence[str] = ()
    """Messages about the choice of nodes."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """The addresses that an earlier check chose, by node."""
    taken_over: History | None = None
    """The history that an earlier controller wrote of this running attempt; None for a new attempt."""
