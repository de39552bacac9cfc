"""Stories of clusters, played to a controller that stays or to several, each of which takes over from the one before.

The nodes are simulated, as far as a controller can tell: they number their frames, send again what was not confirmed,
and repeat what they know to each new controller. The rules, the journal and its reader are the real ones.
"""

from __future__ import annotations

import heapq
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from launcher.gang.decide import decide, new_attempt
from launcher.gang.events import (
    Action,
    AskStacks,
    EndAnnounced,
    Event,
    NodeAttached,
    NodeEmpty,
    NodeLost,
    NodeRefused,
    NodeSignalled,
    ProgramEnded,
    RestartTask,
    StacksReceived,
    StopNodes,
    TaskExited,
    TaskHalted,
    TaskReported,
    TaskStarted,
    Tick,
)
from launcher.gang.policy import AttemptPolicy
from launcher.gang.state import AttemptState, Phase
from launcher.plan.paths import RunPaths
from launcher.report.run_events import State, parse_records
from launcher.rundir.history import History, read_history, replay
from launcher.rundir.journal import Journal
from launcher.tasks import TaskId
from tests.harness.builders.gang import running
from worker_entry.protocol.frozen import dataclass, replace
from worker_entry.protocol.values import Activity, Progress, TaskExit

STEP_S, ANSWER_S, TICK_S, HORIZON_S = 20.0, 1.0, 50.0, 12_000.0
PAUSE_S = 8.0
"""The least time between two events of a story: a takeover and an answer of the tasks fit into it."""
REPEATED = (ProgramEnded, TaskExited, TaskHalted, TaskStarted, NodeEmpty, NodeSignalled)
"""What a node says again, in time. Not a status: that of a task that has ended is not repeated."""
_ENDED = TaskExit(None, signal.SIGTERM)


@dataclass(frozen=True)
class Story:
    """What happens in a cluster that is up.

    `events`: each with the time since the one before. `reports`: whether the program reports steps. `ending`: what the
    tasks that are left do then: they end with status 0, or hang, or seem to hang while they work.
    """

    policy: AttemptPolicy
    events: tuple[tuple[float, Event], ...]
    reports: bool
    ending: Literal["finish", "hang", "work"]


@dataclass(frozen=True)
class Takeover:
    """The `at`-th event is the last that a controller handles; it dies before it acts.

    `lines`: how many lines of its journal are lost with it. `clock_s`: how far the next controller's clocks differ.
    """

    at: int
    lines: int = 0
    clock_s: float = 0.0


class World:
    """The nodes of a story, and its controllers; `folder` has their journal."""

    def __init__(self, story: Story, folder: Path) -> None:
        self.story = story
        self.now = self._told = 0.0
        self._files = RunPaths(folder)
        self._queue: list[tuple[float, int, Event]] = []
        self._number = 0
        self._running = set(story.policy.tasks)
        self._started = {task: TaskStarted(task, 7, 1000.0) for task in story.policy.tasks}
        self._ended: dict[TaskId, TaskExited] = {}
        self._programs: dict[TaskId, ProgramEnded] = {}
        self._dead: set[str] = set()
        self._frames: dict[str, list[Event]] = {node: [] for node in story.policy.nodes}
        self._confirmed = dict.fromkeys(story.policy.nodes, 0)
        self._attached: set[str] = set()
        self._clock_s = 0.0
        self._has_stopped = False
        self._takeover: Takeover | None = None
        self.handled = 0
        """How many events controllers have handled since the cluster is up."""
        self.took_over: History | None = None
        """What the journal told the last controller that took over."""
        self.state = new_attempt(story.policy, 0.0)
        self._journal = self._open()
        for event in running(story.policy):
            self._handle(event, next(iter(story.policy.nodes)))
        self._attached = set(story.policy.nodes)
        self.handled = 0

    def play(self, takeover: Takeover | None = None) -> AttemptState | None:
        """Tells the story to its end; returns the last state, None if the next controller could not take over."""
        self._takeover = takeover
        for wait_s, event in self.story.events:
            self._told += max(wait_s, PAUSE_S)
            self._later(self._told, event)
        if self.story.reports:
            for number in range(1, 2 + int(self._told / STEP_S)):
                for task in self.story.policy.trainers:
                    self._later(STEP_S * number, self._step(task, number))
        if self.story.ending == "finish":
            for place, task in enumerate(sorted(self.story.policy.tasks - self.story.policy.servers)):
                self._later(self._told + PAUSE_S * (place + 1), TaskExited(task, TaskExit(0), self._told))
        while self.state.phase is not Phase.FINISHED and self.now < HORIZON_S:
            due = self._queue[0][0] if self._queue else HORIZON_S
            limits = (self.state.deadline, self.state.raised_due)
            known = [limit - self._clock_s for limit in limits if limit is not None]
            limit = min((limit for limit in known if limit > self.now), default=HORIZON_S)
            self.now = min(due, limit, self.now + TICK_S)
            if not self._queue or due > self.now:
                self._handle(Tick())
            else:
                self._happen(heapq.heappop(self._queue)[2])
            if self._takeover is not None and self.handled > self._takeover.at:
                died, self._takeover = self._takeover, None
                if not self._take_over(died):
                    return None
        self._journal.close()
        return self.state

    def _step(self, task: TaskId, number: int) -> TaskReported:
        return TaskReported(task, "trains", 1000.0, Progress(number, 1, number, 1000.0, 1000.0 + number))

    def _merge(self, status: TaskReported) -> TaskReported:
        """The task's whole status, which has a part that is new."""
        before = next(self._last_status(self._node_of(status.task), status.task), status)
        return replace(
            status,
            progress=status.progress or before.progress,
            injected=status.injected or before.injected,
            saves_when_preempted=status.saves_when_preempted or before.saves_when_preempted,
        )

    def _end(self, event: TaskExited) -> TaskExited:
        """The end of the task's process, which agrees with that of its program if this has ended before."""
        program = self._programs.get(event.task)
        if program is not None and program.crash is not None:
            event = replace(event, exit=event.exit if event.exit.signal else TaskExit(1), crash=program.crash)
        elif program is not None:
            event = replace(event, finished=program.time)
        return replace(event, start=self._started[event.task].start)

    def _node_of(self, task: TaskId) -> str:
        return next(node for node, tasks in self.story.policy.nodes.items() if task in tasks)

    def _later(self, time: float, event: Event) -> None:
        self._number += 1
        heapq.heappush(self._queue, (time, self._number, event))

    def _happen(self, event: Event) -> None:
        match event:
            case NodeLost(node):
                self._dead.add(node)
                self._handle(event)
            case NodeAttached(node) if node in self._dead:
                self._handle(NodeLost(node, "it did not answer"))
            case NodeAttached(node):
                self._attach(node)
            case TaskStarted(task) if task not in self._running and self._node_of(task) not in self._dead:
                self._running.add(task)
                self._ended.pop(task, None)
                self._programs.pop(task, None)
                self._started[task] = replace(event, start=self._started[task].start + 1)
                self._emit(self._node_of(task), self._started[task])
            case ProgramEnded(task) if task in self._programs:
                pass
            case TaskExited(task) | TaskHalted(task) | TaskReported(task) | ProgramEnded(task):
                node = self._node_of(task)
                if task in self._running and node not in self._dead:
                    if isinstance(event, TaskExited):
                        event = self._end(event)
                        self._running.discard(task)
                        self._ended[task] = event
                    elif isinstance(event, ProgramEnded):
                        event = replace(event, start=self._started[task].start)
                        self._programs[task] = event
                    self._emit(node, self._merge(event) if isinstance(event, TaskReported) else event)
            case NodeEmpty(node):
                for task in sorted(self.story.policy.nodes[node] & self._running):
                    self._happen(TaskExited(task, _ENDED, self.now))
                if node not in self._dead:
                    self._emit(node, event)
            case NodeSignalled(node) | NodeRefused(node):
                if node not in self._dead:
                    self._emit(node, event)
            case TaskStarted():
                pass
            case _:
                self._handle(event)

    def _emit(self, node: str, event: Event) -> None:
        self._frames[node].append(event)
        if node in self._attached:
            self._handle(event, node, len(self._frames[node]))

    # --- controllers ---

    def _open(self) -> Journal:
        journal = Journal(self._files.events, lambda: 1e9 + self.now + self._clock_s)
        journal.begin_attempt(1, {})
        return journal

    def _handle(self, event: Event, node: str = "", frame: int = 0) -> None:
        before = self.state
        self.state, actions = decide(before, event, self.now + self._clock_s)
        self._journal.note_event(before, self.state, event, node, frame)
        self.handled += not isinstance(event, Tick)
        if self._takeover is not None and self.handled > self._takeover.at:
            return  # it dies here
        if node:
            self._confirmed[node] = max(frame, self._confirmed[node])
        if self.state.signalled and not before.signalled:
            self._later(self.now + ANSWER_S, EndAnnounced(""))
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case StopNodes():
                self._has_stopped = True
                for node in sorted(self.state.occupied):
                    self._later(self.now + ANSWER_S, NodeEmpty(node))
            case AskStacks():
                activity = Activity(idle_s=0.0 if self.story.ending == "work" else None)
                answers = dict.fromkeys(self._running, activity)
                self._later(self.now + ANSWER_S, StacksReceived(dict.fromkeys(answers, ""), answers))
            case RestartTask(task):
                self._later(self.now + ANSWER_S, TaskStarted(task, 7, self.now))

    def _take_over(self, takeover: Takeover) -> bool:
        self._journal.close()
        lines = self._files.events.read_bytes().splitlines(keepends=True)
        kept = lines[: len(lines) - takeover.lines] if self._are_of_nodes(takeover.lines) else lines
        self._files.events.write_bytes(b"".join(kept))
        self.took_over = history = read_history(self._files)
        if history.state != "running":
            return False
        self._clock_s = takeover.clock_s
        self._journal, self.state = self._open(), replay(history, self.story.policy)
        self._attached = set()
        self._confirmed = {node: max(number, history.frames.get(node, 0)) for node, number in self._confirmed.items()}
        if self.state.signalled and self.state.announced is None:
            self._later(self.now + ANSWER_S, EndAnnounced(""))
        self._queue = [entry for entry in self._queue if not isinstance(entry[2], StacksReceived)]
        heapq.heapify(self._queue)
        for node in self.story.policy.nodes:
            self._later(self.now + ANSWER_S, NodeAttached(node))
        self._handle(Tick())
        return True

    def _are_of_nodes(self, lines: int) -> bool:
        """Whether nodes can repeat what these last lines say; what a user or an engine said would be lost.

        Nor would anybody know why the tasks were stopped, if they were.
        """
        events = [record.event for record in parse_records(self._files.events.read_bytes().splitlines())][-lines:]
        return lines > 0 and not self._has_stopped and all(isinstance(event, (*REPEATED, State)) for event in events)

    def _attach(self, node: str) -> None:
        self._attached.add(node)
        self._handle(NodeAttached(node))
        for number, event in enumerate(self._frames[node][self._confirmed[node] :], self._confirmed[node] + 1):
            self._handle(event, node, number)
        for task in sorted(self.story.policy.nodes[node]):
            self._handle(self._started[task], node, 0)
            if task in self._programs:
                self._handle(self._programs[task], node, 0)
            if task in self._ended:
                self._handle(self._ended[task], node, 0)
            for status in self._last_status(node, task):
                self._handle(status, node, 0)
            for halted in self._last_halt(node, task):
                self._handle(halted, node, 0)

    def _last_status(self, node: str, task: TaskId) -> Iterator[TaskReported]:
        known = [event for event in self._frames[node] if isinstance(event, TaskReported) and event.task == task]
        yield from known[-1:] if task in self._running else ()

    def _last_halt(self, node: str, task: TaskId) -> Iterator[TaskHalted]:
        known = [event for event in self._frames[node] if isinstance(event, TaskHalted) and event.task == task]
        yield from known[-1:] if task in self._running else ()
