"""One attempt: one queue, one loop.

The thread that sees an event (a message, a closed link, a signal) puts it into the queue. Only the loop takes events
out, asks `gang.decide`, and performs the actions. `LogWatch` adds events that only the tasks' logs show.
"""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from launcher.console.messages import Reminder, render_news, render_patches
from launcher.controller.actions import Actions
from launcher.controller.bundle import Transfer
from launcher.controller.context import AttemptSetup, RunContext
from launcher.controller.inbox import Observer
from launcher.controller.requests import ProfileRequests, StackRequests
from launcher.controller.usage import Usage
from launcher.gang.decide import decide, new_attempt
from launcher.gang.events import (
    EndAnnounced,
    Event,
    FilesAsked,
    LeaderWaits,
    NodeLost,
    ProfileAsked,
    StacksAsked,
    TaskExited,
    TaskReported,
    TaskWrote,
    Tick,
)
from launcher.gang.faults import Fault
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, Phase
from launcher.gang.unknown_peers import render_news_of_guards
from launcher.gang.watch.stragglers import Standing, StragglerWatch
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.paths import RunPaths
from launcher.report.models import CompileCacheReport
from launcher.report.run_events import Straggler
from launcher.rundir.history import replay
from launcher.rundir.log_tails import find_size, read_head
from launcher.tasks import TASK_TYPES, TaskId, find_leader
from launcher.transports.base import LinkClosed
from worker_entry.protocol.frozen import replace

TOUCH_S = 2.0
"""How often the journal shows that this controller runs."""
CLAIM_PAUSE_S = 4.0
"""The shortest pause between two requests for GPUs; the longest is twice as long."""
IDLE_S = 0.5
"""How often the loop polls the sources that send no messages: logs, the console, deadlines."""
POLL_S = 0.2
"""How often logs are read."""
IGNORED = 20
"""The number of ignored events that are kept per node, to be shown if there is a bug."""
IGNORED_LENGTH = 200
SILENCE_S = 1.0
"""If the leader logs nothing for this long after all ports have opened, its log level is reduced."""
_WAITING = re.compile(rb"Waiting for (\d+)/\d+ tasks to connect")
_TASK = re.compile(rb"^/job:(\w+)/replica:\d+/task:(\d+)$", re.MULTILINE)


class AttemptLoop:
    """The `number`-th attempt; `faults` are injected into it."""

    def __init__(self, context: RunContext, setup: AttemptSetup, number: int, faults: Sequence[Fault] = ()) -> None:
        self._context = context
        self._number = number
        self.stacks = StackRequests(context)
        """The requests for stacks."""
        self.profiles = ProfileRequests(context)
        """The requests for profiles."""
        self._actions = Actions(context, setup, number, faults, self.stacks)
        self._observer = Observer(context, number, setup.preflight, self.stacks, self.profiles)
        self._logs = LogWatch(context.files, number)
        self._reminder = Reminder(context.timing.monotonic(), self._observer.transfers.render)
        self._stragglers = StragglerWatch()
        self._lost_late: list[NodeLost] = []
        """Nodes that were lost after everything on them had ended."""
        self.state = self._make_state(setup)
        """The current state."""
        self._to_attach = self.state.detached
        self._touch_due = 0.0
        self._ignored: dict[str, deque[str]] = {}
        """The last events of each node that changed nothing."""

    @property
    def plan(self) -> LaunchPlan:
        """The plan of the started tasks; before the start, as far as it is known."""
        return self._actions.plan

    @property
    def usage(self) -> Usage:
        """The resource use of tasks and nodes, as last reported."""
        return self._observer.usage

    @property
    def transfers(self) -> Mapping[str, Transfer]:
        """The files being sent to the nodes."""
        return self._observer.transfers.current

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint is known to have been saved."""
        return self._observer.saved is not None

    @property
    def compile_cache(self) -> CompileCacheReport | None:
        """The loaded and compiled cache entries of all nodes; None if no node has reported them."""
        return self._observer.compile_cache

    @property
    def standings(self) -> Mapping[TaskId, Standing]:
        """The speed of each task relative to the others."""
        return self._stragglers.standings

    @property
    def not_taken_over(self) -> frozenset[str]:
        """The nodes of an earlier controller's attempt that could not be taken over."""
        if self._setup.taken_over is None:
            return frozenset()
        return self._to_attach - self._observer.taken_over

    @property
    def ignored(self) -> list[str]:
        """The last events that changed nothing, with their nodes: repeated ones, or those of a broken agent."""
        return [f"ignored from {node}: {event}" for node, events in self._ignored.items() for event in events]

    def run(self) -> tuple[AttemptState, AttemptSetup]:
        """Runs the attempt to its end; nodes stay connected.

        Returns:
            The final state, and the setup for the next attempt, which does not check the nodes again.
        """
        nodes = {node: len(tasks) for node, tasks in self.state.policy.nodes.items()}
        self._context.journal.begin_attempt(self._number, nodes)
        links = self._context.links
        links.begin(self._number, self.state.policy.nodes)
        self._context.collector.begin_attempt([*self.plan.nodes], self._find_chief())
        if self._setup.taken_over is not None:
            self._actions.take_over(self.state, self._setup.taken_over)
            if self.state.signalled and self.state.announced is None:
                self._ask_source()
        else:
            self._connect()
        links.put(Tick())
        while self.state.phase is not Phase.FINISHED:
            for event in self._next_events():
                self._handle(event)
        for lost in self._lost_late:
            links.put((lost.node, LinkClosed(lost.reason)))  # so that the next attempt sees the loss
        done = replace(self._setup, preflight=None, addresses=self._actions.addresses, notes=(), taken_over=None)
        return self.state, done

    def _find_chief(self) -> str:
        """The node of the task whose checkpoints count."""
        leader = find_leader(task.task for task in self.plan.tasks)
        return next(task.node for task in self.plan.tasks if task.task == leader)

    def _connect(self) -> None:
        self._actions.write_plan()
        links = self._context.links
        links.end_unanswered()  # agents that did not answer in the last attempt
        for node in sorted(self.state.policy.nodes.keys() - self.state.ready):
            links.connect(node, next(self._actions.tasks_of(node)).directory)

    def _next_events(self) -> Iterator[Event]:
        monotonic, deadline = self._context.timing.monotonic, self.state.deadline
        # A deadline that has passed without an effect waits for a node that is not heard.
        until_due = min(deadline - monotonic(), IDLE_S) if deadline is not None and deadline > monotonic() else IDLE_S
        if monotonic() >= self._touch_due:
            self._touch_due = monotonic() + TOUCH_S
            self._context.journal.touch()
        yield from self._observer.next_events(until_due)
        yield from self.stacks.take()
        yield from self._logs.poll(self.state, monotonic())

    def _handle(self, event: Event) -> None:
        earlier = self.state
        if isinstance(event, NodeLost) and event.node in earlier.empty:
            self._lost_late.append(event)
        self.state, actions = decide(earlier, event, self._context.timing.monotonic())
        self._context.journal.note_event(earlier, self.state, event, *self._observer.origin)
        self._report(earlier, event)
        node, _ = self._observer.origin
        if node and self.state is earlier and not actions:
            self._ignored.setdefault(node, deque(maxlen=IGNORED)).append(repr(event)[:IGNORED_LENGTH])
        self._context.depart(self.state)
        self._context.links.claimed = self.state.claimed
        if self.state.reason is None and not self.state.waits_for_gpus:  # it is known which GPUs the nodes keep
            for node in self._context.links.take_fresh(self.state.ready):
                self._actions.preload(node)
        for action in actions:
            self._actions.perform(action, self.state)
        self._actions.restore()
        self._actions.end_checks(self.state)
        if self.state.signalled and not earlier.signalled:
            self._ask_source()
        if isinstance(event, StacksAsked):
            self.stacks.ask(self.state, show=event.shows, tell=True)
        if isinstance(event, ProfileAsked):
            self.profiles.ask(self.plan, event.duration_s)
        if isinstance(event, FilesAsked):
            self._context.collector.begin(patterns=event.patterns)

    def _ask_source(self) -> None:
        """Asks the source of the nodes whether the signalled ones will be taken away, and when."""
        links, unknown = self._context.links, EndAnnounced("")
        self._context.source.ask(lambda found: links.put(found or unknown))

    def _report(self, earlier: AttemptState, event: Event) -> None:
        console, timing = self._context.console, self._context.timing
        now = timing.monotonic()
        news = render_news(earlier, self.state, event) or self._reminder.remind(self.state, now, timing.now())
        if news:
            console.note(news)
        if isinstance(event, TaskExited):
            self.usage.end(event.task)
        if isinstance(event, TaskReported) and event.progress is not None:
            self.usage.note_progress(event.task, event.progress)
            self._context.goodput.note_progress(event.task, event.progress)
            is_compared = event.task in self.state.policy.trainers
            for straggler in self._stragglers.note(event, now, lambda: self.usage.tasks) if is_compared else ():
                console.note(straggler.message)
                self._context.journal.write(
                    Straggler(straggler.task, straggler.message, straggler.score, straggler.reason)
                )
        if self._number == 1 and self._context.spec.guard != "off":
            for line in render_news_of_guards(self.state, event):
                console.warn(line)
        for line in render_patches(event):
            console.note_once(line)

    def _make_state(self, setup: AttemptSetup) -> AttemptState:
        self._setup = setup
        links, policy = self._context.links, self._make_policy()
        known = frozenset(links.ready) & policy.nodes.keys()
        if setup.preflight is not None:
            for node in known:
                setup.preflight.note(node, links.ready[node], links.clock_offset_s(node))
        policy = replace(policy, syncs=policy.syncs - known)
        if setup.taken_over is not None:
            return replay(setup.taken_over, policy)
        unheard = frozenset(links.unheard & policy.nodes.keys())
        return replace(new_attempt(policy, self._context.timing.monotonic()), ready=known, unheard=unheard)

    def _make_policy(self) -> AttemptPolicy:
        spec, plan = self._context.spec, self.plan
        nodes = {node: frozenset(task.task for task in self._actions.tasks_of(node)) for node in plan.nodes}
        return AttemptPolicy(
            nodes=nodes,
            forming=frozenset(task.task for task in plan.tasks if task.opens_port),
            strategy=plan.rules,
            scripts=frozenset(task.task for task in plan.tasks if task.program.kind != "command"),
            max_individual_restarts=spec.restart.max_worker_restarts,
            keeps_auxiliary=spec.tensorboard == "keep",
            start_s=spec.timeouts.start_s,
            drain_s=spec.timeouts.drain_s,
            stop_grace_s=spec.timeouts.stop_grace_s,
            stall_s=spec.timeouts.stall_s,
            wait_gpus_s=spec.wait_gpus_s,
            claim_pause_s=_choose_claim_pause_s(self._context.run_id),
            syncs=self._context.links.far & nodes.keys() if self._context.bundle is not None else frozenset(),
            restores=frozenset(nodes) if self._context.collector.has_checkpoint else frozenset(),
            checks=self._setup.preflight is not None,
            only_checks=self._context.only_checks,
        )


def _choose_claim_pause_s(run_id: str) -> float:
    """A pause that differs between runs: runs that wait for each other's GPUs must not always ask at the same time."""
    return CLAIM_PAUSE_S * (1.0 + zlib.crc32(run_id.encode()) / 2**32)


class LogWatch:
    """The polling of one attempt's logs."""

    def __init__(self, files: RunPaths, attempt: int) -> None:
        self._files = files
        self._attempt = attempt
        self._sizes: dict[TaskId, int] = {}
        self._polled = self._joined = 0.0

    def poll(self, state: AttemptState, now: float) -> Iterator[Event]:
        """Events of a forming cluster, or of a running one that may stall; `now`: monotonic seconds."""
        if now < self._polled + POLL_S:
            return
        if state.phase is Phase.FORMING and state.policy.strategy.collective:
            self._polled = now
            yield from self._read_leader(state, now)
        elif state.phase is Phase.RUNNING and state.policy.stall_s:
            self._polled = now
            yield from self._check_sizes(state)

    def _read_leader(self, state: AttemptState, now: float) -> Iterator[Event]:
        not_joined: frozenset[TaskId] | None = frozenset()
        if len(state.policy.forming) > 1:
            leader = find_leader(state.policy.forming)
            if leader is None or leader not in state.started:
                return
            not_joined = parse_not_joined(read_head(self._files.log(self._attempt, leader)))
        if state.missing or not self._joined:
            self._joined = now
        elif not_joined is None and now - self._joined > SILENCE_S:
            not_joined = frozenset()
        if not_joined != state.not_joined:
            yield LeaderWaits(not_joined)

    def _check_sizes(self, state: AttemptState) -> Iterator[Event]:
        for task in state.policy.tasks:
            size = find_size(self._files.log(self._attempt, task))
            if size != self._sizes.get(task, 0):
                self._sizes[task] = size
                yield TaskWrote(task)


def parse_not_joined(log: bytes) -> frozenset[TaskId] | None:
    """The tasks that the leader's log named last as not joined (some, if there are many); None if it names nothing.

    A task with an open port may still fail to reach the leader, because something blocks its connection. TensorFlow
    reports this only at level INFO: with TF_CPP_MIN_LOG_LEVEL above 0, nothing is known.
    """
    last = None
    for last in _WAITING.finditer(log):  # noqa: B007 - the last match counts
        pass
    if last is None:
        return None
    if int(last[1]) == 0:
        return frozenset()
    named = _TASK.findall(log, last.end())
    known = {name.encode(): name for name in TASK_TYPES}
    return frozenset(TaskId(known[job], int(index)) for job, index in named if job in known)
