"""A simulated process with the real controller of a run: supervisor, attempts, rules, verdicts, journal and report."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.console.terminal import NowhereSink
from launcher.console.writer import Console
from launcher.controller.collect.collector import Collector
from launcher.controller.context import RunContext
from launcher.controller.goodput import watch_goodput
from launcher.controller.launch import prepare_nothing, reporting_failure
from launcher.controller.links import NodeLinks
from launcher.controller.nodes import Recovered
from launcher.controller.resume import prepare
from launcher.controller.supervisor import Supervisor
from launcher.errors import EXIT_BUG, DistlaunchError, RunDirectoryError, ShownError, TakenOverError
from launcher.gang.events import EndAnnounced, Fact
from launcher.plan.planner import Planner, fill_in_folders
from launcher.plan.rendering import render_spec
from launcher.report.models import RunReport
from launcher.report.run_events import AttemptEnded, Ended, Record, State
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.history import NO_HISTORY, read_history
from launcher.rundir.journal import Journal
from launcher.signals import Interrupts
from launcher.sources.base import NodeSource
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.transports.base import AgentAddress, Transport
from launcher.transports.node_cleanup import CleanedNode
from tests.sim.storm.links import StormLink, StormTransport
from tests.sim.storm.simulation import Killed, Process, SimulatedTiming
from tests.sim.storm.streams import NodeStream, NodeTransport, close_all
from worker_entry.protocol.frozen import dataclass, replace

if TYPE_CHECKING:
    from tests.sim.storm.machines import Machine
    from tests.sim.storm.world import World

RUN_ID = "storm"
DEV_FULL = "/dev/full"
ASK_S = 0.5
"""How long an engine takes to say why it sent a signal."""


@dataclass(frozen=True)
class StormFiles(RunDir):
    """The folder of a run, as one controller sees it: its disk may be full, and a dead controller writes nothing."""

    controller: Controller

    def write_text(self, path: Path, text: str) -> None:
        controller = self.controller
        if controller.process.is_dead:
            return
        controller.count_effect()
        if controller.world.is_disk_full:
            raise RunDirectoryError(f"cannot write {path}: no space")
        path.write_text(text, encoding="utf-8")


class StormSource(NodeSource):
    """An engine that may take nodes away."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._put: Callable[[EndAnnounced], None] = lambda _: None
        self._ends: list[EndAnnounced] = []

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        self._put = put

    def close(self) -> None:
        self._put = lambda _: None

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        self._controller.process.after(ASK_S, lambda: answer(self.find_end()))

    def forget(self) -> None:
        self._ends = [end for end in self._ends if not end.stays and not end.replaced]

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
        del lost
        return self._ends[-1] if self._ends else None

    def will_return(self, tell: Callable[[str], None]) -> bool:
        del tell
        return self._controller.world.scenario.source == "slurm"

    def announce(self, end: EndAnnounced, *, is_told: bool) -> None:
        """The engine decides to end nodes; `is_told`: whether it says so at once."""
        self._ends.append(end)
        if is_told:
            self._put(end)


class Controller:
    """One controller of the run, from its start to its end or death.

    Args:
        world: has the nodes.
        generation: how many controllers the run had before.
        requeued: whether the engine has started it again.
    """

    def __init__(self, world: World, generation: int, *, requeued: bool = False) -> None:
        self.world = world
        self.generation = generation
        self.process = Process(world.simulation, self._main)
        self.timing = SimulatedTiming(world.simulation, self.process)
        self.timing.ahead_s = world.controller_ahead_s
        self.interrupts = Interrupts()
        self.links: list[StormLink] = []
        """The simulated links."""
        self.streams: list[NodeStream] = []
        """The open connections of real links."""
        self.source = StormSource(self)
        self._node_links: NodeLinks | None = None
        self.supervisor: Supervisor | None = None
        self.journal: Journal | None = None
        self.report: RunReport | None = None
        self.error: DistlaunchError | None = None
        self.is_fenced = self.waits = False
        self.known: object = None
        """The state of the attempt when the journal had its last line."""
        self._requeued = requeued
        self._effects_left = -1
        self._spared = -1
        """The journal's descriptor while its disk is full."""

    # --- for the world ---

    def signal(self, signum: int) -> None:
        self.process.do(lambda: self.interrupts._handle(signum, None))

    def ask(self, signum: int) -> None:
        self.process.do(lambda: self.interrupts.ask(signum))

    def drop(self, machine: Machine) -> None:
        """The connections to this machine are reset."""
        for link in self.links:
            if link.wire is not None and link.wire.machine is machine:
                self.process.do(partial(link.drop, "it was reset"))
        for stream in [*self.streams]:
            if stream.machine is machine:
                stream.reset()

    def kill_soon(self, effects: int) -> None:
        """Kills it before it has so many further effects."""
        self._effects_left = effects
        self.world.simulation.after(5.0, self.kill)

    def kill(self) -> None:
        if self.process.is_dead:
            return
        self._note_death()
        self.process.kill()

    def _note_death(self) -> None:
        for link in self.links:
            link.die()
        self._close_files()
        self.world.note_death(self)

    def _close_files(self) -> None:
        """Its process has ended."""
        close_all(self.streams)
        if self._node_links is not None:
            self._node_links._mirror.close()

    def check_fence(self, machine: Machine) -> None:
        """Called before something is sent to an agent: while a lost node is fenced, its agent must hear nothing."""
        links = self._node_links
        if links is not None and self.timing.monotonic() < links.fences.get(machine.name, 0.0):
            self.world.break_rule("fenced", f"something is sent to the agent of {machine.name}, which is lost")

    def count_effect(self) -> None:
        """Called before each effect on files and nodes: at any of them, the controller may be killed."""
        if self._effects_left < 0 or self.process.is_dead:
            return
        self._effects_left -= 1
        if self._effects_left < 0:
            self.kill()

    # --- the process ---

    def _main(self) -> None:
        try:
            self._conduct()
        except Killed:
            raise
        except TakenOverError:
            self.is_fenced = True
        except DistlaunchError as error:
            self.error = error
            if isinstance(error, ShownError) and error.exit_status == EXIT_BUG:
                self.world.break_rule("bug", "".join(traceback.format_exception(error.__cause__ or error)))
        except Exception as error:  # noqa: BLE001 - it is reported
            self.world.break_rule("bug", "".join(traceback.format_exception(error)))
        self._close_files()
        self.world.note_end_of_controller(self)

    def _conduct(self) -> None:
        """As `launch.conduct` and `resume` do, without a console, a socket and exporters."""
        world, timing = self.world, self.timing
        files = StormFiles(world.files.root, self)
        history = read_history(files) if self.generation else NO_HISTORY
        if not self._requeued:
            history = replace(history, endings=())
        started = world.began
        start = RunStart(run_id=RUN_ID, name=RUN_ID, started=started, generation=self.generation)
        spec = fill_in_folders(ClusterSpec.model_validate(world.fields), files)
        with (
            files.hold(start, timing.now) as journal,
            reporting_failure(files, start, journal, history, page=False, now=timing.now),
            contextlib.closing(Console(NowhereSink(), record=journal.say)) as console,
        ):
            self.journal = journal
            world.note_controller(self)
            journal.listen(self._note_record)
            planner = Planner(spec, str(files.root), {}, sys.executable)
            files.write_text(files.spec, render_spec(spec))
            setup = (
                prepare(
                    files,
                    history,
                    RUN_ID,
                    planner,
                    console,
                    self.interrupts,
                    attended=history.attended,
                    changed=False,
                    clean=self._clean,
                    timing=timing,
                )
                if self.generation
                else prepare_nothing(planner, console, self.interrupts)
            )
            if setup is not None:
                world.note_takeover(self, setup)
            context = self._make_context(spec, files, journal, console, started)
            if self.generation and setup is None:
                planner = self._relist_with(context)(planner, lambda: True)
            self.supervisor = Supervisor(
                context,
                planner,
                self._recover,
                self.interrupts,
                relist=self._relist_with(context),
                checks=world.scenario.checks,
                history=history,
                taken_over=setup,
            )
            self.report = self.supervisor.run()
            self.waits = journal.waits = self.supervisor.continues_later and self.source.will_return(console.note)
            if timing.repeating:
                world.break_rule("threads", "a function is still called after the run")

    def _make_context(
        self, spec: ClusterSpec, files: StormFiles, journal: Journal, console: Console, started: float
    ) -> RunContext:
        links = self._node_links = NodeLinks(self._connect(spec), RUN_ID, files, spec.timeouts.lease_s, self.timing)
        return RunContext(
            run_id=RUN_ID,
            spec=spec,
            files=files,
            links=links,
            console=console,
            journal=journal,
            started=started,
            goodput=watch_goodput(files, journal, started, spec),
            generation=self.generation,
            collector=Collector(spec, files, links, started, console.warn),
            source=self.source,
            find_left=lambda _: [7 for _ in self.world.machines["local"].processes],
        )

    def _connect(self, spec: ClusterSpec) -> Mapping[str, Transport]:
        return {node.host: self._make_transport(node.host) for node in spec.nodes}

    def _make_transport(self, host: str) -> Transport:
        machine = self.world.machine(host)
        return NodeTransport(self, machine, RUN_ID) if self.world.scenario.is_whole else StormTransport(self, machine)

    def _relist_with(self, context: RunContext) -> Callable[[Planner, Callable[[], bool]], Planner]:
        def relist(planner: Planner, _is_wanted: Callable[[], bool]) -> Planner:
            hosts = {node.host: self.world.replacements.get(node.host, node.host) for node in planner.spec.nodes}
            if all(before == after for before, after in hosts.items()):
                return planner
            nodes = [node.changed(host=hosts[node.host]) for node in planner.spec.nodes]
            spec = planner.spec.with_nodes(nodes)
            context.links.add(self._connect(spec))
            context.files.write_text(context.files.spec, render_spec(spec))
            self.world.fields = {**self.world.fields, "nodes": [node.model_dump(exclude_unset=True) for node in nodes]}
            return replace(planner, spec=spec)

        return relist

    def _clean(self, _spec: ClusterSpec, node: NodeSpec, _run_ids: object) -> CleanedNode:
        machine = self.world.machine(node.host)
        if not machine.is_reachable:
            return CleanedNode(node.host, problem="it cannot be reached")
        self.world.note_end_of_tasks(machine)
        return CleanedNode(node.host, machine.clean())

    def _recover(self, host: str, _agent: AgentAddress) -> Recovered:
        machine = self.world.machine(host)
        if not machine.is_reachable:
            return Recovered.NO
        machine.clean()
        return Recovered.YES

    def _note_record(self, record: Record) -> None:
        if self is not self.world.controllers[-1] and isinstance(record.event, (Fact, State, AttemptEnded, Ended)):
            self.world.break_rule("fenced", f"generation {self.generation} still writes {record.event}")
        loop = self.supervisor.loop if self.supervisor is not None else None
        self.known = loop.state if loop is not None else None
        self.count_effect()

    # --- its disk ---

    def fill_disk(self) -> None:
        if self.journal is not None and self.journal._descriptor >= 0:
            full = os.open(DEV_FULL, os.O_WRONLY | os.O_CLOEXEC)
            self._spared = os.dup(self.journal._descriptor)
            os.dup2(full, self.journal._descriptor)
            os.close(full)

    def free_disk(self) -> None:
        if self._spared >= 0 and self.journal is not None:
            if self.journal._descriptor >= 0:
                os.dup2(self._spared, self.journal._descriptor)
            os.close(self._spared)
        self._spared = -1
