"""The shell around the gang: it carries frames and signals to `gang.decide` and performs what that decided.

One queue, one loop. Everything that happens (a frame, a closed link, a signal) is put into the queue by whoever
sees it, and only the loop acts.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.chaos import Fault
from launcher.console import Console
from launcher.events import (
    Action,
    AskStacks,
    Checked,
    CheckNodes,
    Event,
    Interrupted,
    NodeLost,
    NodeReady,
    NodeRefused,
    PrepareNodes,
    StacksAsked,
    StacksTold,
    StartAgain,
    StartTasks,
    StopNodes,
    SyncNodes,
    Tick,
    from_message,
)
from launcher.gang import decide, new_gang
from launcher.gang_state import Gang, Phase, Rules
from launcher.log_watch import LogWatch
from launcher.news import Reminder, render_news, render_patches
from launcher.node_links import NodeLinks
from launcher.pace import PaceWatch
from launcher.plan import LaunchPlan, TaskPlan, make_preload
from launcher.plan_text import render_json
from launcher.preflight import Preflight
from launcher.resources import NodeFacts
from launcher.run_dir import RunDir
from launcher.spec import LOCAL
from launcher.spec_parts import TimeoutsSpec
from launcher.stacks import StackCollector, render_stacks
from launcher.starts import make_start
from launcher.sync import Bundle
from launcher.tasks import TaskId, parse_task_id
from launcher.transports.base import LinkClosed, LinkDropped, LinkNote, LinkResumed
from worker_entry import clock
from worker_entry.messages import Dialled, Fetch, Inspected, Message, Noted, Ready, Stacks
from worker_entry.orders import Prepare, ShowStacks, Start, Stop
from worker_entry.values import Problem

IDLE_S = 0.5
"""How often what nobody tells us is looked at."""

Replan = Callable[[Mapping[str, NodeFacts], Mapping[TaskId, int] | None, Mapping[str, str] | None], LaunchPlan]
"""Makes the plan from what the nodes said of themselves, the ports they hold, and the addresses they can dial."""


@dataclass(frozen=True)
class Cast:
    """The nodes that take part: how to plan for them, how to check them first, if at all, and what the user is told.

    `dialled`: the addresses that an earlier check has chosen, by node.
    """

    replan: Replan
    preflight: Preflight | None
    notes: Sequence[str] = ()
    dialled: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """What all attempts of a run share. `timeouts` and `port_range` are the spec's.

    `restarts`: whether there may be more than one. With `only_checks`, nothing is started.
    """

    run_id: str
    run_dir: RunDir
    links: NodeLinks
    console: Console
    timeouts: TimeoutsSpec
    port_range: tuple[int, int]
    restarts: bool
    max_worker_restarts: int = 0
    keeps_tensorboard: bool = False
    bundle: Bundle | None = None
    only_checks: bool = False


class GangLoop:
    """One attempt, the `attempt`-th.

    `faults` are those to be done in it. `plan` is what was started, `dialled` the addresses that the checks chose, as
    far as they are known.
    """

    def __init__(self, stage: Stage, chosen: Cast, attempt: int, faults: Sequence[Fault] = ()) -> None:
        self._faults = faults
        self._stage = stage
        self._links = stage.links
        self._console = stage.console
        self._replan = chosen.replan
        self._preflight = chosen.preflight
        self._attempt = attempt
        self.plan = chosen.replan({}, None, None)
        self._checked = False
        self.dialled = chosen.dialled
        self._unread = False
        self._collector: StackCollector | None = None
        self._shows_stacks = False
        self._logs = LogWatch(stage.run_dir, attempt)
        self.gang = self._new_gang()
        """The attempt as far as it has come."""

    def run(self) -> Gang:
        """Returns the last state, when nothing is left of the attempt. Nodes that are connected already stay so."""
        self._write_plan()
        gang = self.gang
        self._links.begin(self._attempt, gang.rules.nodes)
        for node in gang.rules.nodes.keys() - gang.ready:
            self._links.connect(node, next(self._tasks_of(node)).directory)
        self._links.put(Tick())
        reminder, pace = Reminder(time.monotonic()), PaceWatch()
        while gang.phase is not Phase.FINISHED:
            until_due = IDLE_S if gang.deadline is None else min(gang.deadline - time.monotonic(), IDLE_S)
            for event in (
                *self._next_events(until_due),
                *self._take_stacks(),
                *self._logs.look(gang, time.monotonic()),
            ):
                earlier = gang
                gang, actions = decide(gang, event, time.monotonic())
                self.gang = gang
                now = time.monotonic()
                news = render_news(earlier, gang, event) or reminder.remind(gang, now, clock.now())
                if news or (news := pace.note(event, now)):
                    self._console.note(news)
                if patches := render_patches(event):
                    self._console.note_once(patches)
                if isinstance(event, NodeReady) and gang is not earlier:
                    self._preload(event.node)
                for action in actions:
                    self._perform(action, gang)
                self._end_checks(gang)
                if isinstance(event, StacksAsked):
                    self._shows_stacks = True
                    self._ask_stacks(gang)
        return gang

    def _new_gang(self) -> Gang:
        rules = self._rules()
        known = frozenset(self._links.ready) & rules.nodes.keys()
        if self._preflight is not None:
            for node in known:
                self._preflight.note(node, self._links.ready[node], self._links.clock_offset_s(node))
        return replace(new_gang(rules, time.monotonic()), ready=known, rules=replace(rules, syncs=rules.syncs - known))

    # --- what happens ---

    def _next_events(self, timeout_s: float) -> Iterator[Event]:
        happening = self._links.next(timeout_s)
        if happening is None:
            yield from self._overdue()
            return
        if not isinstance(happening, tuple):
            yield happening
            return
        node, message = happening
        match message:
            case LinkClosed(reason):
                yield NodeLost(node, reason)
                return
            case LinkDropped(reason):
                wait_s = self._stage.timeouts.lease_s
                self._console.warn(f"node {node}: {reason}; its tasks go on, looking for a way back for {wait_s:g} s")
                return
            case LinkResumed(after_s):
                self._console.note(f"node {node}: connected again after {after_s:.1f} s; nothing was lost")
                return
            case LinkNote(text):
                self._console.warn(text)
                return
        yield from self._translate(node, message)

    def _translate(self, node: str, message: Message) -> Iterator[Event]:
        offset_s = self._links.clock_offset_s(node)
        if self._preflight is not None and isinstance(message, (Ready, Inspected, Dialled)):
            self._preflight.note(node, message, offset_s)
        try:
            if isinstance(message, Fetch) and self._stage.bundle is not None:
                self._links.send(node, *self._stage.bundle.read_piece(message))
            if isinstance(message, Noted):
                self._console.note(message.text if node == LOCAL else f"node {node}: {message.text}")
            if isinstance(message, Stacks) and self._collector is not None:
                self._collector.note(parse_task_id(message.task), message.text, message.activity)
            event = from_message(node, message, offset_s)
        except ValueError as error:
            event = NodeLost(node, f"the agent sent {error}")
        if event is not None:
            yield event

    def _overdue(self) -> Iterator[Event]:
        if self._console.broken and not self._unread:  # `distlaunch … | head`
            self._unread = True
            yield Interrupted(signal.SIGPIPE)
        yield Tick()

    # --- actions ---

    def _perform(self, action: Action, gang: Gang) -> None:
        match action:
            case SyncNodes():
                assert self._stage.bundle is not None
                for node in gang.rules.syncs & gang.awaited:
                    self._links.send(node, self._stage.bundle.offer)
            case PrepareNodes():
                self.plan = self._replan(self._links.facts(), None, None)
                for warning in self.plan.warnings if self._attempt == 1 else ():
                    self._console.warn(warning)
                checks = self._preflight if gang.rules.checks else None
                for node in gang.awaited:
                    requests = [task.request for task in self._tasks_of(node)]
                    nonce = checks.nonce if checks is not None else ""
                    self._links.send(node, Prepare(self._attempt, requests, *self._stage.port_range, nonce))
                    if checks is not None:
                        self._links.send(node, checks.make_inspect(node))
            case CheckNodes():
                assert self._preflight is not None
                for node in gang.awaited:
                    self._links.send(node, self._preflight.make_dial(gang.ports))
            case StartTasks(ports):
                self.plan = self._replan(self._links.facts(), ports, self.dialled)
                self._write_plan()
                for node in gang.rules.nodes:
                    self._links.send(node, self._make_start([*self._tasks_of(node)]))
                for task in self.plan.tasks:
                    if task.task.is_side:  # its words are of no use to anybody
                        continue
                    self._console.follow(task.task, self._stage.run_dir.log(self._attempt, task.task))
            case StartAgain(task):
                self._faults = [fault for fault in self._faults if fault.task != task]
                [planned] = (plan for plan in self.plan.tasks if plan.task == task)
                self._links.send(planned.node, self._make_start([planned]))
            case AskStacks():
                self._ask_stacks(gang)
            case StopNodes(grace_s):
                if gang.signal is not None:
                    self._links.hurry()
                for node in gang.rules.nodes.keys() - gang.empty.keys() - gang.lost.keys():
                    self._links.send(node, Stop(grace_s))

    def _preload(self, node: str) -> None:
        """Has the node begin with what takes longest, while the others are still on their way."""
        plan = self._replan(self._links.facts(), None, None)
        again = self._stage.restarts or (self._stage.max_worker_restarts > 0 and bool(plan.rules.returns))
        preload = make_preload(plan, node, keep=again)
        if preload is not None and not self._stage.only_checks:
            self._links.send(node, preload)

    def _end_checks(self, gang: Gang) -> None:
        """Once all nodes have answered, the gang is told what came of it."""
        checks = self._preflight
        if checks is None or gang.phase is not Phase.CHECKING or self._checked or not checks.is_complete(gang.awaited):
            return
        self._checked = True
        self.dialled = checks.choose_addresses()
        for choice in checks.render_choices():
            self._console.note(choice)
        errors: list[Event] = []
        for finding in () if self._stage.only_checks else checks.findings():
            if finding.level == "warning":
                self._console.warn(finding.message)
            else:
                problem = Problem(finding.reference, finding.message, finding.cure)
                errors.append(NodeRefused(finding.node, (problem,)))
        for event in errors or [Checked()]:
            self._links.put(event)

    def _ask_stacks(self, gang: Gang) -> None:
        """Asks for them, unless all are being asked already."""
        if self._collector is None:
            self._collector = StackCollector(gang.started.keys() - gang.exits.keys(), time.monotonic())
            for node in gang.rules.nodes.keys() - gang.empty.keys() - gang.lost.keys():
                self._links.send(node, ShowStacks())

    def _take_stacks(self) -> Iterator[StacksTold]:
        """Hands them on once all tasks have answered, and shows them if the user has asked."""
        texts = self._collector.texts(time.monotonic()) if self._collector is not None else None
        if self._collector is not None and texts is not None:
            activity, self._collector = self._collector.activity, None
            text = render_stacks(texts)
            if problem := self._stage.run_dir.write_stacks(f"{text}\n"):
                self._console.warn(problem)
            if self._shows_stacks:
                self._console.note(text or "no task is running")
            self._shows_stacks = False
            yield StacksTold(texts, activity)

    def _tasks_of(self, node: str) -> Iterator[TaskPlan]:
        return (task for task in self.plan.tasks if task.node == node)

    def _make_start(self, tasks: Sequence[TaskPlan]) -> Start:
        return make_start(
            tasks,
            run_id=self._stage.run_id,
            attempt=self._attempt,
            lease_s=self._stage.timeouts.lease_s,
            faults=self._faults,
        )

    def _rules(self) -> Rules:
        nodes = {node: frozenset(task.task for task in self._tasks_of(node)) for node in self.plan.nodes}
        strategy = self.plan.rules
        return Rules(
            nodes=nodes,
            forming=frozenset(task.task for task in self.plan.tasks if task.opens_port),
            decides=strategy.decides,
            serves=strategy.serves,
            returns=strategy.returns,
            max_returns=self._stage.max_worker_restarts,
            keeps_sides=self._stage.keeps_tensorboard,
            has_leader=strategy.collective,
            start_s=self._stage.timeouts.start_s,
            drain_s=self._stage.timeouts.drain_s,
            stop_grace_s=self._stage.timeouts.stop_grace_s,
            stall_s=self._stage.timeouts.stall_s,
            syncs=self._links.far & nodes.keys() if self._stage.bundle is not None else frozenset(),
            checks=self._preflight is not None,
            only_checks=self._stage.only_checks,
        )

    def _write_plan(self) -> None:
        self._stage.run_dir.write_json(self._stage.run_dir.plan, render_json(self.plan))
