"""The shell around the gang: it carries frames and signals to `gang.decide` and performs what that decided.

One queue, one loop. Everything that happens (a frame, a closed link, a signal) is put into the queue by whoever
sees it, and only the loop acts. A cluster that has failed is started again here, if `restarts` says so.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from launcher.console import Console
from launcher.events import (
    Action,
    Checked,
    CheckNodes,
    Event,
    Interrupted,
    NodeLost,
    NodeRefused,
    PrepareNodes,
    StartTasks,
    StopNodes,
    SyncNodes,
    Tick,
    from_message,
)
from launcher.gang import Gang, Phase, Rules, decide, new_gang
from launcher.interrupts import noting_signals
from launcher.news import Reminder, render_news, render_restart
from launcher.node_links import NodeLinks
from launcher.plan import LaunchPlan, NodeFacts, TaskPlan, render_json
from launcher.preflight import Preflight
from launcher.report import TAIL_LINES, Attempt, make_run_report, make_versions, render_error, render_summary
from launcher.restarts import Ending, GiveUp, Restart, decide_restart
from launcher.results import RunReport
from launcher.run_dir import RunDir, last_lines
from launcher.spec_parts import RestartSpec, TimeoutsSpec
from launcher.sync import Bundle
from launcher.tasks import TaskId, parse_task_id
from launcher.transports.base import LinkClosed, LinkDropped, LinkNote, LinkResumed
from launcher.verdict import judge, outcome
from worker_entry.messages import Dialled, Fetch, Inspected, Message, Prepare, Ready, Start, Stop
from worker_entry.values import Problem, TaskStart

IDLE_S = 0.5
"""How often what nobody tells us is looked at."""
JUDGED_LINES = 60
"""Of the end of a failed task's log: what it died of is told there, if anywhere."""

Replan = Callable[[Mapping[str, NodeFacts], Mapping[TaskId, int] | None, Mapping[str, str] | None], LaunchPlan]
"""Makes the plan from what the nodes said of themselves, the ports they hold, and the addresses they can dial."""


class Supervisor:
    """One run. `timeouts`, `restart` and `port_range` are the spec's; `links` has a way to each node of the plan, and
    `clean` ends what is left of the run on nodes that were lost.

    With a `preflight` the nodes are checked before the first start; with `only_checks`, nothing is started.
    """

    def __init__(
        self,
        replan: Replan,
        timeouts: TimeoutsSpec,
        restart: RestartSpec,
        port_range: tuple[int, int],
        run_id: str,
        run_dir: RunDir,
        links: NodeLinks,
        clean: Callable[[Collection[str]], None],
        console: Console,
        preflight: Preflight | None = None,
        bundle: Bundle | None = None,
        *,
        only_checks: bool = False,
    ) -> None:
        self._replan = replan
        self._plan = replan({}, None, None)
        self._preflight = preflight
        self._bundle = bundle
        self._only_checks = only_checks
        self._checked = False
        self._dialled: dict[str, str] = {}
        self._timeouts = timeouts
        self._restart = restart
        self._port_range = port_range
        self._run_id = run_id
        self._run_dir = run_dir
        self._links = links
        self._clean = clean
        self._console = console
        self._attempt = 1
        self._unread = False

    def run(self) -> RunReport:
        """Runs the cluster to its end; returns once nothing is left of it and the report is written.

        Raises:
            DistlaunchError: it could not be started; nothing is left running.
        """
        attempts: list[Attempt] = []
        interrupted = None
        with noting_signals(lambda signum: self._links.put(Interrupted(signum))):
            try:
                while True:
                    attempts.append(self._run_attempt(attempts[-1].gang if attempts else None))
                    restart = self._decide_restart(attempts)
                    if restart is None:
                        break
                    interrupted = self._pause(restart.pause_s)
                    if interrupted is not None:
                        break
                    self._attempt += 1
            finally:
                left = self._links.close()
        return self._report(attempts, left, interrupted)

    def check(self) -> Gang:
        """Looks at the nodes, and starts nothing."""
        with noting_signals(lambda signum: self._links.put(Interrupted(signum))):
            try:
                return self._supervise(None)
            finally:
                self._links.close()

    # --- one attempt after the other ---

    def _run_attempt(self, before: Gang | None) -> Attempt:
        started = time.time()
        gang = self._supervise(before)
        logs = {task: self._run_dir.log(self._attempt, task) for task in gang.rules.tasks}
        verdict = judge(
            gang,
            self._plan,
            {task: str(path) for task, path in logs.items()},
            tails={task: last_lines(logs[task], JUDGED_LINES) for task, event in gang.exits.items() if event.failed},
            agents_said=last_lines(self._run_dir.agent_errors, 3),
        )
        self._console.end_logs()
        if outcome(gang) == "failed":
            tail = last_lines(logs[parse_task_id(verdict.task)], TAIL_LINES) if verdict.task else []
            self._console.error(render_error(verdict, tail))
        shown = {task: self._run_dir.relative(path) for task, path in logs.items()}
        return Attempt(self._attempt, gang, self._plan, verdict, started, time.time(), shown)

    def _decide_restart(self, attempts: list[Attempt]) -> Restart | None:
        if outcome(attempts[-1].gang) != "failed":
            return None
        decision = decide_restart(self._restart, [_ending(attempt) for attempt in attempts])
        if isinstance(decision, GiveUp):
            if decision.reason:
                self._console.note(decision.reason)
            return None
        self._console.note(render_restart(decision, self._attempt + 1, self._restart.max_restarts))
        return decision

    def _pause(self, seconds: float) -> int | None:
        """Waits; returns the signal by which the user has ended that."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            happening = self._links.next(min(left_s, IDLE_S))
            if isinstance(happening, Interrupted):
                return happening.signal
            if isinstance(happening, tuple) and isinstance(happening[1], LinkClosed):
                self._links.forget([happening[0]])
        return None

    def _supervise(self, before: Gang | None) -> Gang:
        """Runs one attempt to its end; `before` is how the one before it ended."""
        self._write_plan()
        rules = self._rules()
        gang = new_gang(rules, time.monotonic())
        if before is not None:
            self._links.forget(before.lost.keys())
            self._clean(before.lost.keys())
            gang = replace(gang, ready=frozenset(self._links.ready))
            gang = replace(gang, rules=replace(rules, syncs=rules.syncs - gang.ready, checks=False))
        for node in rules.nodes.keys() - gang.ready:
            self._links.connect(node, next(self._tasks_of(node)).directory)
        self._links.put(Tick())
        reminder = Reminder(time.monotonic())
        while gang.phase is not Phase.FINISHED:
            until_due = IDLE_S if gang.deadline is None else min(gang.deadline - time.monotonic(), IDLE_S)
            for event in self._next_events(until_due):
                earlier = gang
                gang, actions = decide(gang, event, time.monotonic())
                if news := render_news(earlier, gang, event) or reminder.remind(gang, time.monotonic()):
                    self._console.note(news)
                for action in actions:
                    self._perform(action, gang)
                self._end_checks(gang)
        return gang

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
                wait_s = self._timeouts.lease_s
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
            if isinstance(message, Fetch) and self._bundle is not None:
                self._links.send(node, *self._bundle.read_piece(message))
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
                assert self._bundle is not None
                for node in gang.rules.syncs & gang.awaited:
                    self._links.send(node, self._bundle.offer)
            case PrepareNodes():
                self._plan = self._replan(self._links.facts(), None, None)
                for warning in self._plan.warnings if self._attempt == 1 else ():
                    self._console.warn(warning)
                checks = self._preflight if gang.rules.checks else None
                for node in gang.awaited:
                    requests = [task.request for task in self._tasks_of(node)]
                    nonce = checks.nonce if checks is not None else ""
                    self._links.send(node, Prepare(self._attempt, requests, *self._port_range, nonce))
                    if checks is not None:
                        self._links.send(node, checks.make_inspect(node))
            case CheckNodes():
                assert self._preflight is not None
                for node in gang.awaited:
                    self._links.send(node, self._preflight.make_dial(gang.ports))
            case StartTasks(ports):
                self._plan = self._replan(self._links.facts(), ports, self._dialled)
                self._write_plan()
                for node in gang.rules.nodes:
                    starts = [self._start(task) for task in self._tasks_of(node)]
                    self._links.send(node, Start(self._attempt, starts))
                for task in self._plan.tasks:
                    self._console.follow(task.task, self._run_dir.log(self._attempt, task.task))
            case StopNodes(grace_s):
                for node in gang.rules.nodes.keys() - gang.empty.keys() - gang.lost.keys():
                    self._links.send(node, Stop(grace_s))

    def _end_checks(self, gang: Gang) -> None:
        """Once all nodes have answered, the gang is told what came of it."""
        checks = self._preflight
        if checks is None or gang.phase is not Phase.CHECKING or self._checked or not checks.is_complete(gang.awaited):
            return
        self._checked = True
        self._dialled = checks.choose_addresses()
        for choice in checks.render_choices():
            self._console.note(choice)
        errors: list[Event] = []
        for finding in () if self._only_checks else checks.findings():
            if finding.level == "warning":
                self._console.warn(finding.message)
            else:
                problem = Problem(finding.reference, finding.message, finding.cure)
                errors.append(NodeRefused(finding.node, (problem,)))
        for event in errors or [Checked()]:
            self._links.put(event)

    def _tasks_of(self, node: str) -> Iterator[TaskPlan]:
        return (task for task in self._plan.tasks if task.node == node)

    def _start(self, task: TaskPlan) -> TaskStart:
        env = {**task.env, "DISTLAUNCH_RUN_ID": self._run_id, "DISTLAUNCH_ATTEMPT": str(self._attempt)}
        return TaskStart(str(task.task), task.program, env, ["TF_CONFIG"], task.mend_keras, self._timeouts.lease_s)

    def _rules(self) -> Rules:
        nodes = {node: frozenset(task.task for task in self._tasks_of(node)) for node in self._plan.nodes}
        return Rules(
            nodes=nodes,
            forming=frozenset(task.task for task in self._plan.tasks if task.opens_port),
            start_s=self._timeouts.start_s,
            drain_s=self._timeouts.drain_s,
            stop_grace_s=self._timeouts.stop_grace_s,
            syncs=self._links.far if self._bundle is not None else frozenset(),
            checks=self._preflight is not None,
            only_checks=self._only_checks,
        )

    def _write_plan(self) -> None:
        self._run_dir.write_json(self._run_dir.plan, render_json(self._plan))

    def _report(self, attempts: list[Attempt], left: Mapping[str, int | None], interrupted: int | None) -> RunReport:
        report = make_run_report(
            attempts,
            run_id=self._run_id,
            directory=str(self._run_dir.root),
            ended=time.time(),
            left=left,
            versions=make_versions(self._links.ready.values()),
            interrupted=interrupted,
        )
        self._console.note(render_summary(report))
        self._run_dir.write_json(self._run_dir.report, report.model_dump(mode="json"))
        return report


def _ending(attempt: Attempt) -> Ending:
    """What `restarts` wants to know of it."""
    reference = attempt.verdict.reference
    if reference == "node-unreachable" and attempt.number > 1:  # it was reached before
        reference = "node-lost"
    # Of a program that is not ours to run nothing is known.
    foreign = all(task.program.kind == "command" for task in attempt.plan.tasks)
    trained = foreign or attempt.gang.rules.forming <= attempt.gang.listening.keys()
    return Ending(reference, attempt.started, attempt.ended, trained)
