"""A controller's answers to the requests on its control socket."""

from __future__ import annotations

import json
import signal
import time

from launcher.controller.attempt import AttemptLoop
from launcher.controller.goodput import GoodputWatch
from launcher.controller.links import NodeLinks
from launcher.controller.requests import find_servers
from launcher.controller.supervisor import Supervisor
from launcher.gang.events import FilesAsked, ProfileAsked, StacksAsked
from launcher.plan.paths import RunPaths
from launcher.report.models import Collection
from launcher.report.status_report import RunStatus, TaskState, estimate_eta_s, make_node_states, make_task_states
from launcher.rundir.control import AskFiles, AskProfile, AskStacks, AskStop, RefusedError, Request
from launcher.rundir.directory import RunStart
from launcher.rundir.journal import Journal
from launcher.signals import Interrupts
from worker_entry.protocol.frozen import asdict
from worker_entry.system import clock

STACKS_S = 15.0
"""How long tasks may take to show their stacks."""
POLL_S = 0.05


class Answers:
    """Answers for the socket's threads, which reach the run's own thread only through its queue.

    Until `attach`, the run has no tasks but can already be stopped.
    """

    def __init__(
        self, start: RunStart, files: RunPaths, journal: Journal, interrupts: Interrupts, goodput: GoodputWatch
    ) -> None:
        self._start = start
        self._files = files
        self._journal = journal
        self._interrupts = interrupts
        self._goodput = goodput
        self._run: tuple[Supervisor, NodeLinks] | None = None

    def attach(self, supervisor: Supervisor, links: NodeLinks) -> None:
        """Makes later answers describe this supervisor's run."""
        self._run = supervisor, links

    def __call__(self, request: Request) -> bytes:
        """Returns the answer to a request.

        Raises:
            RefusedError: the request has no answer.
        """
        match request:
            case AskStop(now):
                for signum in (signal.SIGTERM, signal.SIGINT) if now else (signal.SIGTERM,):
                    self._interrupts.ask(signum)
                return b""
            case AskStacks():
                return self._collect_stacks().encode()
            case AskProfile():
                return self._profile(request).encode()
            case AskFiles(begins, patterns):
                return self._collect(begins, patterns).encode()
        return self.make_status().model_dump_json().encode()

    def make_status(self) -> RunStatus:
        """Returns the run's current status; any thread may call it."""
        loop = self._run[0].loop if self._run is not None else None
        again, now = max(self._journal.attempt - 1, 0), clock.now()
        return RunStatus(
            run_id=self._start.run_id,
            name=self._start.name,
            directory=str(self._files.root),
            state=self._journal.state,
            attempt=self._journal.attempt,
            restarts=again + sum(map(len, loop.state.restarted.values())) if loop is not None else again,
            started=self._start.started,
            now=now,
            tasks=_make_tasks(loop) if loop is not None else [],
            nodes=make_node_states(loop.usage.nodes) if loop is not None else [],
            goodput=self._goodput.count(now),
            eta_s=estimate_eta_s(loop.state, now) if loop is not None else None,
        )

    def _profile(self, request: AskProfile) -> str:
        loop = self._run[0].loop if self._run is not None else None
        if self._run is None or loop is None:
            raise RefusedError("no task has been started yet")
        requests, before = loop.profiles, len(loop.profiles.answers)
        self._run[1].put(ProfileAsked(request.duration_s))
        deadline = time.monotonic() + request.limit_s
        while len(requests.answers) == before:
            if time.monotonic() > deadline:
                raise RefusedError("the tasks do not answer")
            time.sleep(POLL_S)
        names = [target.name for target in find_servers(loop.plan).values()]
        return json.dumps({"tasks": names, "answer": asdict(requests.answers[before])})

    def _collect(self, begins: bool, patterns: list[str]) -> str:
        loop = self._run[0].loop if self._run is not None else None
        if self._run is None or loop is None or not loop.state.started:
            raise RefusedError("no task has been started yet")
        collector = self._run[0].collector
        if begins and not patterns and not collector.is_wanted:
            raise RefusedError("its spec has no `collect`; name the files: `distlaunch collect RUN PATTERN`")
        if begins:
            rounds = collector.rounds
            self._run[1].put(FilesAsked(tuple(patterns)))
            deadline = time.monotonic() + STACKS_S
            while collector.rounds == rounds and not collector.is_busy:
                if time.monotonic() > deadline:
                    raise RefusedError(f"it has not begun within {STACKS_S:g} s")
                time.sleep(POLL_S)
        collection = Collection(
            is_over=not collector.is_busy, progress=collector.render_progress(), nodes=collector.make_report()
        )
        return collection.model_dump_json()

    def _collect_stacks(self) -> str:
        if self._run is None:
            raise RefusedError("no task has been started yet")
        supervisor, links = self._run
        asked = supervisor.loop
        before = asked.stacks.count if asked is not None else 0
        links.put(StacksAsked(shows=False))
        deadline = time.monotonic() + STACKS_S
        # The answers may be those of the next attempt.
        while (loop := supervisor.loop) is None or loop.stacks.count == (before if loop is asked else 0):
            if time.monotonic() > deadline:
                raise RefusedError(f"the tasks did not show their stacks within {STACKS_S:g} s")
            time.sleep(POLL_S)
        return f"{loop.stacks.text}\n"


def _make_tasks(loop: AttemptLoop) -> list[TaskState]:
    """The states of the loop's tasks; on a node that is receiving files, the state is the transfer's progress."""
    tasks = make_task_states(loop.state, loop.plan, loop.usage.tasks, loop.standings)
    transfers = loop.transfers
    return [
        task.model_copy(update={"state": f"receiving {transfers[task.node]}"}) if task.node in transfers else task
        for task in tasks
    ]
