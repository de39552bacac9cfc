"""The shell around the gang: it carries frames and signals to `gang.decide` and performs what that decided.

One queue, one loop. Everything that happens (a frame, a closed link, a signal) is put into the queue by whoever
sees it, and only the loop acts.
"""

from __future__ import annotations

import os
import platform
import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from launcher.console import Console
from launcher.events import (
    Action,
    Event,
    Interrupted,
    NodeLost,
    PrepareNodes,
    StartTasks,
    StopNodes,
    Tick,
    from_message,
)
from launcher.gang import Gang, Phase, Rules, decide, new_gang
from launcher.log_lines import LogLines
from launcher.news import render_news
from launcher.plan import LaunchPlan, NodeFacts, TaskPlan, render_json
from launcher.report import TAIL_LINES, make_attempt_report, render_error, render_summary
from launcher.results import RunReport
from launcher.run_dir import RunDir
from launcher.spec import TimeoutsSpec
from launcher.tasks import TaskId, parse_task_id
from launcher.transports.base import (
    Link,
    LinkClosed,
    LinkDropped,
    LinkNews,
    LinkResumed,
    LogMirror,
    Transport,
)
from launcher.verdict import exit_status, judge, outcome
from worker_entry.messages import (
    VERSION,
    Goodbye,
    Hello,
    Message,
    Prepare,
    Ready,
    Start,
    Stop,
    TaskRequest,
    TaskStart,
)

IDLE_S = 0.5
"""How often what nobody tells us is looked at."""
NODE_FILES = "~/.local/state/distlaunch/nodes"
"""Where an agent on another machine keeps a run's logs, in the home folder there."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLOSING_AT_ONCE = 64
QUEUE_LIMIT = 10_000
"""Waiting events above which links are not read further."""

TAIL_BYTES = 16 << 10
"""How much of a log's end is looked at for its last lines."""

Replan = Callable[[Mapping[str, NodeFacts], Mapping[TaskId, int] | None], LaunchPlan]
"""Makes the plan from what the nodes said of themselves, and from the ports they hold, once they do."""


class Supervisor:
    """One run. `timeouts` and `port_range` are the spec's; `transports` has one for each node of the plan."""

    def __init__(
        self,
        replan: Replan,
        timeouts: TimeoutsSpec,
        port_range: tuple[int, int],
        run_id: str,
        run_dir: RunDir,
        transports: Mapping[str, Transport],
        console: Console,
    ) -> None:
        self._replan = replan
        self._plan = replan({}, None)
        self._timeouts = timeouts
        self._port_range = port_range
        self._run_id = run_id
        self._run_dir = run_dir
        self._transports = transports
        self._console = console
        self._events: queue.SimpleQueue[tuple[str, Message | LinkNews] | Interrupted] = queue.SimpleQueue()
        self._links: dict[str, Link] = {}
        self._ready: dict[str, Ready] = {}
        self._attempt = 1
        self._unread = False

    def run(self) -> RunReport:
        """Runs the cluster to its end; returns once nothing is left of it and the report is written.

        Raises:
            DistlaunchError: it could not be started; nothing is left running.
        """
        previous = {signum: signal.signal(signum, self._note_signal) for signum in SIGNALS}
        mirror = LogMirror(lambda attempt, task: self._run_dir.log(attempt, parse_task_id(task)))
        started = time.time()
        try:
            try:
                gang = self._supervise(mirror)
            finally:
                left = self._close_links()
                mirror.close()
            return self._report(gang, started, left)
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    # --- the loop ---

    def _supervise(self, mirror: LogMirror) -> Gang:
        self._write_plan()
        gang = new_gang(self._rules(), time.monotonic())
        for node, transport in self._transports.items():
            self._connect(node, transport, mirror)
        while gang.phase is not Phase.FINISHED:
            until_due = IDLE_S if gang.deadline is None else min(gang.deadline - time.monotonic(), IDLE_S)
            for event in self._next_events(until_due):
                before = gang
                gang, actions = decide(gang, event, time.monotonic())
                if news := render_news(before, gang, event):
                    self._console.note(news)
                for action in actions:
                    self._perform(action, gang)
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
                cwd=self._plan.directory,
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
        if isinstance(item, Interrupted):
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
            case Ready():
                self._ready[node] = message
        try:
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

    def _note_signal(self, signum: int, _frame: object) -> None:
        self._events.put(Interrupted(signum))

    # --- actions ---

    def _perform(self, action: Action, gang: Gang) -> None:
        match action:
            case PrepareNodes():
                self._plan = self._replan(self._facts(), None)
                for warning in self._plan.warnings:
                    self._console.warn(warning)
                for node, link in self._links.items():
                    link.send(
                        Prepare(
                            self._attempt,
                            [_request(task) for task in self._tasks_of(node)],
                            *self._port_range,
                        )
                    )
            case StartTasks(ports):
                self._plan = self._replan(self._facts(), ports)
                self._write_plan()
                for node, link in self._links.items():
                    link.send(Start(self._attempt, [self._start(task) for task in self._tasks_of(node)]))
                for task in self._plan.tasks:
                    self._console.follow(task.task, self._run_dir.log(self._attempt, task.task))
            case StopNodes(grace_s):
                for node, link in self._links.items():
                    if node not in gang.empty and node not in gang.lost:
                        link.send(Stop(grace_s))

    def _facts(self) -> dict[str, NodeFacts]:
        return {node: NodeFacts(ready.cores, tuple(ready.gpus)) for node, ready in self._ready.items()}

    def _tasks_of(self, node: str) -> Iterator[TaskPlan]:
        return (task for task in self._plan.tasks if task.node == node)

    def _start(self, task: TaskPlan) -> TaskStart:
        env = {**task.env, "DISTLAUNCH_RUN_ID": self._run_id, "DISTLAUNCH_ATTEMPT": str(self._attempt)}
        return TaskStart(str(task.task), task.program, env, unset=["TF_CONFIG"], mend_keras=task.mend_keras)

    def _rules(self) -> Rules:
        nodes = {node: frozenset(task.task for task in self._tasks_of(node)) for node in self._plan.nodes}
        return Rules(
            nodes=nodes,
            forming=frozenset(task.task for task in self._plan.tasks if task.opens_port),
            start_s=self._timeouts.start_s,
            drain_s=self._timeouts.drain_s,
            stop_grace_s=self._timeouts.stop_grace_s,
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

    def _report(self, gang: Gang, started: float, left: Mapping[str, int | None]) -> RunReport:
        logs = {task: self._run_dir.log(self._attempt, task) for task in gang.rules.tasks}
        verdict = judge(
            gang,
            self._plan,
            {task: str(path) for task, path in logs.items()},
            agents_said=_tail(self._run_dir.agent_errors, 3),
        )
        now = time.time()
        attempt = make_attempt_report(
            gang,
            self._plan,
            verdict,
            attempt=self._attempt,
            started=started,
            ended=now,
            logs={task: self._run_dir.relative(path) for task, path in logs.items()},
            left=left,
        )
        report = RunReport(
            run_id=self._run_id,
            name=self._plan.name,
            outcome=outcome(gang),
            exit_status=exit_status(gang),
            versions=self._versions(),
            directory=str(self._run_dir.root),
            started=started,
            ended=now,
            attempts=[attempt],
        )
        self._console.end_logs()
        if report.outcome == "failed":
            tail = _tail(logs[parse_task_id(verdict.task)], TAIL_LINES) if verdict.task else []
            self._console.error(render_error(verdict, tail))
        self._console.note(render_summary(report))
        self._run_dir.write_json(self._run_dir.report, report.model_dump(mode="json"))
        return report

    def _versions(self) -> dict[str, str]:
        versions = {"distlaunch": metadata.version("distlaunch"), "python": platform.python_version()}
        for ready in self._ready.values():
            if ready.tensorflow is not None:
                versions.setdefault("tensorflow", ready.tensorflow)
        return versions


def _request(task: TaskPlan) -> TaskRequest:
    return TaskRequest(str(task.task), task.program, task.port if task.explicit_port else 0)


def _tail(path: Path, count: int) -> list[str]:
    """The last lines of a file that say something; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            data = file.read()
    except OSError:
        return []
    log = LogLines()
    lines = [*log.feed(data), *log.close()]
    return [line.decode("utf-8", "replace")[:400] for line in lines if line.strip()][-count:]
