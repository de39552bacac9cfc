"""One attempt: one queue, one loop.

Whatever happens (a message, a closed link, a signal) is put into the queue by the thread that sees it. The loop alone
takes it out, asks `gang.decide`, and performs the actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.console.messages import Reminder, render_news, render_patches
from launcher.gang.decide import decide, new_gang
from launcher.gang.events import Event, NodeReady, StacksAsked, Tick
from launcher.gang.faults import Fault
from launcher.gang.state import Gang, Phase, Rules
from launcher.gang.stragglers import PaceWatch
from launcher.plan.launch_plan import LaunchPlan
from launcher.run.actions import Actions
from launcher.run.context import AttemptSetup, RunContext
from launcher.run.log_watch import LogWatch
from launcher.run.observation import Observer
from launcher.run.stack_requests import StackRequests
from worker_entry.system import clock

IDLE_S = 0.5
"""How often the loop looks at what sends no message: logs, the console, deadlines."""


class AttemptLoop:
    """The `number`-th attempt; `faults` are injected into it."""

    def __init__(self, context: RunContext, setup: AttemptSetup, number: int, faults: Sequence[Fault] = ()) -> None:
        self._context = context
        self._number = number
        self._stacks = StackRequests(context)
        self._actions = Actions(context, setup, number, faults, self._stacks)
        self._observer = Observer(context, setup.preflight, self._stacks)
        self._logs = LogWatch(context.files, number)
        self._reminder = Reminder(context.monotonic())
        self._pace = PaceWatch()
        self.gang = self._new_gang(setup)
        """The attempt as far as it has come."""

    @property
    def plan(self) -> LaunchPlan:
        """What was started, as far as it is known."""
        return self._actions.plan

    def run(self) -> tuple[Gang, AttemptSetup]:
        """Runs the attempt until nothing is left of it; nodes that are connected stay so.

        Returns:
            The last state, and the setup with which an attempt after it can begin: its nodes have been checked.
        """
        self._actions.write_plan()
        links = self._context.links
        links.begin(self._number, self.gang.rules.nodes)
        for node in self.gang.rules.nodes.keys() - self.gang.ready:
            links.connect(node, next(self._actions.tasks_of(node)).directory)
        links.put(Tick())
        while self.gang.phase is not Phase.FINISHED:
            for event in self._next_events():
                self._handle(event)
        return self.gang, replace(self._setup, preflight=None, dialled=self._actions.dialled, notes=())

    def _next_events(self) -> Iterator[Event]:
        monotonic, deadline = self._context.monotonic, self.gang.deadline
        until_due = IDLE_S if deadline is None else min(deadline - monotonic(), IDLE_S)
        yield from self._observer.next_events(until_due)
        yield from self._stacks.take()
        yield from self._logs.look(self.gang, monotonic())

    def _handle(self, event: Event) -> None:
        earlier = self.gang
        self.gang, actions = decide(earlier, event, self._context.monotonic())
        self._tell(earlier, event)
        if isinstance(event, NodeReady) and self.gang is not earlier:
            self._actions.preload(event.node)
        for action in actions:
            self._actions.perform(action, self.gang)
        self._actions.end_checks(self.gang)
        if isinstance(event, StacksAsked):
            self._stacks.ask(self.gang, show=True)

    def _tell(self, earlier: Gang, event: Event) -> None:
        console, now = self._context.console, self._context.monotonic()
        news = render_news(earlier, self.gang, event) or self._reminder.remind(self.gang, now, clock.now())
        if news or (news := self._pace.note(event, now)):
            console.note(news)
        if patches := render_patches(event):
            console.note_once(patches)

    def _new_gang(self, setup: AttemptSetup) -> Gang:
        self._setup = setup
        links, rules = self._context.links, self._make_rules()
        known = frozenset(links.ready) & rules.nodes.keys()
        if setup.preflight is not None:
            for node in known:
                setup.preflight.note(node, links.ready[node], links.clock_offset_s(node))
        rules = replace(rules, syncs=rules.syncs - known)
        return replace(new_gang(rules, self._context.monotonic()), ready=known)

    def _make_rules(self) -> Rules:
        spec, plan = self._context.spec, self.plan
        nodes = {node: frozenset(task.task for task in self._actions.tasks_of(node)) for node in plan.nodes}
        return Rules(
            nodes=nodes,
            forming=frozenset(task.task for task in plan.tasks if task.opens_port),
            strategy=plan.rules,
            max_returns=spec.restart.max_worker_restarts,
            keeps_sides=spec.tensorboard == "keep",
            start_s=spec.timeouts.start_s,
            drain_s=spec.timeouts.drain_s,
            stop_grace_s=spec.timeouts.stop_grace_s,
            stall_s=spec.timeouts.stall_s,
            syncs=self._context.links.far & nodes.keys() if self._context.bundle is not None else frozenset(),
            checks=self._setup.preflight is not None,
            only_checks=self._context.only_checks,
        )
