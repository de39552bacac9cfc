"""The shell around the gang: it carries frames and signals to `gang.decide` and performs what that decided.

One queue, one loop. Everything that happens (a frame, a closed link, a signal) is put into the queue by whoever
sees it, and only the loop acts.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
from launcher.news import Reminder, render_news
from launcher.plan import LaunchPlan, NodeFacts, TaskPlan, render_json
from launcher.preflight import Preflight
from launcher.report import TAIL_LINES, make_run_report, make_versions, render_error, render_summary
from launcher.results import RunReport
from launcher.run_dir import RunDir, last_lines
from launcher.spec import TimeoutsSpec
from launcher.sync import Bundle
from launcher.tasks import TaskId, parse_task_id
from launcher.transports.base import (
    Link,
    LinkClosed,
    LinkDropped,
    LinkNews,
    LinkNote,
    LinkResumed,
    LogMirror,
    Transport,
)
from launcher.verdict import judge
from worker_entry.messages import (
    VERSION,
    Dialled,
    Fetch,
    Goodbye,
    Hello,
    Inspected,
    Message,
    Prepare,
    Ready,
    Start,
    Stop,
)
from worker_entry.values import Problem, TaskStart

IDLE_S = 0.5
"""How often what nobody tells us is looked at."""
NODE_FILES = "~/.local/state/distlaunch/nodes"
"""Where an agent on another machine keeps a run's logs, in the home folder there."""
CLOSING_AT_ONCE = 64
JUDGED_LINES = 60
"""Of the end of a failed task's log: what it died of is told there, if anywhere."""
QUEUE_LIMIT = 10_000
"""Waiting events above which links are not read further."""

Replan = Callable[[Mapping[str, NodeFacts], Mapping[TaskId, int] | None, Mapping[str, str] | None], LaunchPlan]
"""Makes the plan from what the nodes said of themselves, the ports they hold, and the addresses they can dial."""


class Supervisor:
    """One run. `timeouts` and `port_range` are the spec's; `transports` has one for each node of the plan.

    With a `preflight` the nodes are checked before the start; with `only_checks`, nothing is started.
    """

    def __init__(
        self,
        replan: Replan,
        timeouts: TimeoutsSpec,
        port_range: tuple[int, int],
        run_id: str,
        run_dir: RunDir,
        transports: Mapping[str, Transport],
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
        self._port_range = port_range
        self._run_id = run_id
        self._run_dir = run_dir
        self._transports = transports
        self._console = console
        self._events: queue.SimpleQueue[tuple[str, Message | LinkNews] | Event] = queue.SimpleQueue()
        self._links: dict[str, Link] = {}
        self._ready: dict[str, Ready] = {}
        self._attempt = 1
        self._unread = False

    def run(self) -> RunReport:
        """Runs the cluster to its end; returns once nothing is left of it and the report is written.

        Raises:
            DistlaunchError: it could not be started; nothing is left running.
        """
        started = time.time()
        return self._report(*self.run_gang(), started)

    def run_gang(self) -> tuple[Gang, dict[str, int | None]]:
        """The same without a report: the last state, and how many processes are left on each node, None if unknown."""
        mirror = LogMirror(lambda attempt, task: self._run_dir.log(attempt, parse_task_id(task)))
        with noting_signals(lambda signum: self._events.put(Interrupted(signum))):
            try:
                gang = self._supervise(mirror)
            finally:
                left = self._close_links()
                mirror.close()
        return gang, left

    # --- the loop ---

    def _supervise(self, mirror: LogMirror) -> Gang:
        self._write_plan()
        gang = new_gang(self._rules(), time.monotonic())
        for node, transport in self._transports.items():
            self._connect(node, transport, mirror)
        reminder = Reminder(time.monotonic())
        while gang.phase is not Phase.FINISHED:
            until_due = IDLE_S if gang.deadline is None else min(gang.deadline - time.monotonic(), IDLE_S)
            for event in self._next_events(until_due):
                before = gang
                gang, actions = decide(gang, event, time.monotonic())
                if news := render_news(before, gang, event) or reminder.remind(gang, time.monotonic()):
                    self._console.note(news)
                for action in actions:
                    self._perform(action, gang)
                self._end_checks(gang)
        return gang

    def _connect(self, node: str, transport: Transport, mirror: LogMirror) -> None:
        try:
            link = transport.connect(node, self._deliver, mirror, self._timeouts.lease_s)
        except OSError as error:
            self._events.put((node, LinkClosed(f"cannot start {error.filename or 'the agent'}: {error.strerror}")))
            return
        self._links[node] = link
        link.send(
            Hello(
                version=VERSION,
                run_id=self._run_id,
                directory=str(self._run_dir.root if transport.shares_files else Path(NODE_FILES, self._run_id)),
                cwd=next(self._tasks_of(node)).directory,
                lease_s=self._timeouts.lease_s,
                stream_logs=not transport.shares_files,
            )
        )

    def _next_events(self, timeout_s: float) -> Iterator[Event]:
        try:
            item = self._events.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            yield from self._overdue()
            return
        if not isinstance(item, tuple):
            yield item
            return
        node, message = item
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
            case Ready():
                self._ready[node] = message
        if self._preflight is not None and isinstance(message, (Ready, Inspected, Dialled)):
            self._preflight.note(node, message, self._links[node].clock_offset_s)
        try:
            if isinstance(message, Fetch) and self._bundle is not None:
                self._links[node].send(*self._bundle.read_piece(message))
            event = from_message(node, message, self._links[node].clock_offset_s)
        except ValueError as error:
            event = NodeLost(node, f"the agent sent {error}")
        if event is not None:
            yield event

    def _overdue(self) -> Iterator[Event]:
        if self._console.broken and not self._unread:  # `distlaunch … | head`
            self._unread = True
            yield Interrupted(signal.SIGPIPE)
        yield Tick()

    def _deliver(self, node: str, message: Message | LinkNews) -> None:
        while self._events.qsize() > QUEUE_LIMIT:
            time.sleep(0.01)  # a link's thread waits here, and behind it the agent, on its disk
        self._events.put((node, message))

    # --- actions ---

    def _perform(self, action: Action, gang: Gang) -> None:
        match action:
            case SyncNodes():
                assert self._bundle is not None
                for node in gang.rules.syncs & gang.awaited:
                    self._links[node].send(self._bundle.offer)
            case PrepareNodes():
                self._plan = self._replan(self._facts(), None, None)
                for warning in self._plan.warnings:
                    self._console.warn(warning)
                nonce = self._preflight.nonce if self._preflight is not None else ""
                for node in gang.awaited:
                    requests = [task.request for task in self._tasks_of(node)]
                    self._links[node].send(Prepare(self._attempt, requests, *self._port_range, nonce))
                    if self._preflight is not None:
                        self._links[node].send(self._preflight.make_inspect(node))
            case CheckNodes():
                assert self._preflight is not None
                for node in gang.awaited:
                    self._links[node].send(self._preflight.make_dial(gang.ports))
            case StartTasks(ports):
                self._plan = self._replan(self._facts(), ports, self._dialled)
                self._write_plan()
                for node, link in self._links.items():
                    link.send(Start(self._attempt, [self._start(task) for task in self._tasks_of(node)]))
                for task in self._plan.tasks:
                    self._console.follow(task.task, self._run_dir.log(self._attempt, task.task))
            case StopNodes(grace_s):
                for node, link in self._links.items():
                    if node not in gang.empty and node not in gang.lost:
                        link.send(Stop(grace_s))

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
            self._events.put(event)

    def _facts(self) -> dict[str, NodeFacts]:
        return {node: NodeFacts(ready.cores, tuple(ready.gpus)) for node, ready in self._ready.items()}

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
            syncs=frozenset(n for n, way in self._transports.items() if self._bundle and not way.shares_files),
            checks=self._preflight is not None,
            only_checks=self._only_checks,
        )

    def _close_links(self) -> dict[str, int | None]:
        """Ends every agent; returns how many processes are left on each node, None where that is unknown."""
        for link in self._links.values():
            link.send(Goodbye())
        # This machine last: closing its link ends all that is left below us, ways to other machines included.
        here = [node for node in self._links if self._transports[node].shares_files]
        others = [node for node in self._links if node not in here]
        with ThreadPoolExecutor(max_workers=CLOSING_AT_ONCE) as pool:
            left = dict(zip(others, pool.map(lambda node: self._links[node].close(), others), strict=True))
        return left | {node: self._links[node].close() for node in here}

    def _write_plan(self) -> None:
        self._run_dir.write_json(self._run_dir.plan, render_json(self._plan))

    # --- telling the user ---

    def _report(self, gang: Gang, left: Mapping[str, int | None], started: float) -> RunReport:
        logs = {task: self._run_dir.log(self._attempt, task) for task in gang.rules.tasks}
        verdict = judge(
            gang,
            self._plan,
            {task: str(path) for task, path in logs.items()},
            tails={task: last_lines(logs[task], JUDGED_LINES) for task, event in gang.exits.items() if event.failed},
            agents_said=last_lines(self._run_dir.agent_errors, 3),
        )
        report = make_run_report(
            gang,
            self._plan,
            verdict,
            run_id=self._run_id,
            directory=str(self._run_dir.root),
            attempt=self._attempt,
            started=started,
            ended=time.time(),
            logs={task: self._run_dir.relative(path) for task, path in logs.items()},
            left=left,
            versions=make_versions(self._ready.values()),
        )
        self._console.end_logs()
        if report.outcome == "failed":
            tail = last_lines(logs[parse_task_id(verdict.task)], TAIL_LINES) if verdict.task else []
            self._console.error(render_error(verdict, tail))
        self._console.note(render_summary(report))
        self._run_dir.write_json(self._run_dir.report, report.model_dump(mode="json"))
        return report
