"""Translates messages of nodes and the user into the gang's events."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator

from launcher.controller.bundle import Bundle, Transfers
from launcher.controller.context import RunContext
from launcher.controller.requests import ProfileRequests, StackRequests
from launcher.controller.task_input import InputArrived, Reply
from launcher.controller.usage import Usage
from launcher.errors import TakenOverError
from launcher.gang.checks.preflight import Answer, Preflight
from launcher.gang.events import (
    Event,
    Interrupted,
    NodeAttached,
    NodeBusy,
    NodeClaimed,
    NodeEmpty,
    NodeHeard,
    NodeInspected,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    NodeSignalled,
    NodeSynced,
    NodeUnheard,
    ProgramEnded,
    TaskExited,
    TaskHalted,
    TaskInterrupted,
    TaskListening,
    TaskReported,
    TaskStarted,
    TaskUnguarded,
    Tick,
)
from launcher.gang.unknown_peers import render_rejected
from launcher.report import run_events
from launcher.report.models import CompileCacheReport
from launcher.report.run_events import Checkpoint, ConnectionRejected
from launcher.rundir.samples import SampleFiles
from launcher.tasks import LOCAL, parse_task_id
from launcher.transports.base import LinkClosed, LinkDropped, LinkNews, LinkNote, LinkResumed, LinkTakenOver
from launcher.wording import render_duration
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.gpus import GpusClaimed
from worker_entry.protocol.messages import (
    AskInput,
    Broken,
    CacheUsed,
    ConnectionsRejected,
    Empty,
    Exited,
    Fetch,
    Halted,
    Inspected,
    InterruptTaken,
    Listening,
    Message,
    Noted,
    Prepared,
    Ready,
    Refused,
    Returned,
    Sampled,
    Saved,
    Signalled,
    Stacks,
    Started,
    Status,
    Synced,
    Unguarded,
)
from worker_entry.protocol.profiles import Profiled
from worker_entry.protocol.values import CrashRecord, Problem


def tell_link(
    context: RunContext, node: str, news: LinkDropped | LinkResumed | LinkNote, *, has_tasks: bool = True
) -> None:
    """Reports a change of a node's connection to the user and the journal; `has_tasks`: whether tasks may run there."""
    match news:
        case LinkDropped(reason):
            context.journal.write(run_events.LinkDropped(node, reason))
            wait_s = context.spec.timeouts.lease_s
            tasks = "its tasks continue; " if has_tasks else ""
            context.console.warn(f"node {node}: {reason}; {tasks}reconnecting for up to {wait_s:g} s")
        case LinkResumed(after_s):
            context.journal.write(run_events.LinkResumed(node, after_s))
            context.console.note(f"node {node}: reconnected after {render_duration(after_s)}; nothing was lost")
        case LinkNote(text):
            context.console.warn(text)


class Observer:
    """The reader of a run's queue during one attempt; it also passes answers to the checks and stack requests."""

    def __init__(
        self,
        context: RunContext,
        attempt: int,
        preflight: Preflight | None,
        stacks: StackRequests,
        profiles: ProfileRequests,
    ) -> None:
        self._context = context
        self._preflight = preflight
        self._stacks = stacks
        self._profiles = profiles
        self._unread = False
        self.saved: Saved | None = None
        """The last checkpoint that was saved in this attempt."""
        self.compile_cache: CompileCacheReport | None = None
        """The number of entries that the nodes have loaded from and added to their compile caches."""
        self.usage = Usage(SampleFiles(context.files, attempt))
        """The resource use of tasks and nodes."""
        self.transfers = Transfers()
        """The files being sent to the nodes."""
        self.taken_over: set[str] = set()
        """The nodes whose agents this controller has taken over from an earlier one."""
        self.origin = ("", 0)
        """The node of the last event and the number of its message; empty for the controller's own event."""

    def next_events(self, timeout_s: float) -> Iterator[Event]:
        """Yields the next events; a Tick after the timeout."""
        incoming = self._context.links.next(timeout_s)
        self.origin = ("", 0)
        if incoming is None:
            yield from self._overdue()
            return
        if isinstance(incoming, InputArrived):
            if self._context.input is not None:
                self._give(self._context.input.arrived())
            return
        if not isinstance(incoming, tuple):
            yield incoming
            return
        node, message = incoming
        console = self._context.console
        if isinstance(message, LinkNews):
            self._context.collector.note(node, message)
        match message:
            case LinkClosed(taken_over=True) if self._context.files.find_generation() > self._context.generation:
                raise TakenOverError
            case LinkClosed(reason):
                yield NodeLost(node, reason)
            case LinkTakenOver():
                self.taken_over.add(node)
                console.note(f"node {node}: taken over; its tasks continue")
                yield NodeAttached(node)
            case LinkDropped():
                tell_link(self._context, node, message)
                yield NodeUnheard(node)
            case LinkResumed():
                tell_link(self._context, node, message)
                yield NodeHeard(node)
            case LinkNote():
                tell_link(self._context, node, message)
            case _:
                self.origin = (node, self._context.links.frame)
                yield from self._translate(node, message)

    def _give(self, replies: Iterable[Reply]) -> None:
        for node, part, body in replies:
            self._context.links.send(node, part, body)

    def _translate(self, node: str, message: Message) -> Iterator[Event]:
        links = self._context.links
        offset_s = links.clock_offset_s(node)
        if self._preflight is not None and isinstance(message, Answer):
            self._preflight.note(node, message, offset_s)
            yield Tick()  # the checks may continue
        try:
            if isinstance(message, Fetch) and (bundle := self._find_bundle(message)) is not None:
                self.transfers.note(node, message, self._context.timing.monotonic())
                links.send(node, *bundle.read_piece(message))
                yield Tick()  # a queue that is never empty leaves no time for reminders
            if self._context.collector.note(node, message):
                yield Tick()
            self._note(node, message, offset_s)
            event = from_message(node, message, offset_s)
        except ValueError as error:
            event = NodeLost(node, f"the agent sent {error}")
        if event is not None:
            yield event

    def _note(self, node: str, message: Message, offset_s: float) -> None:
        """Handles the part of a message that does not concern the gang: records, notes to the user, and answers."""
        context = self._context
        match message:
            case Synced():
                self.transfers.end(node)
            case AskInput() if context.input is not None:
                self._give(context.input.answer(node, message))
            case Noted(text, detail):
                shown = text if node == LOCAL else f"node {node}: {text}"
                (context.console.detail if detail else context.console.note)(shown)
            case Ready():
                context.journal.write(run_events.NodeMet(node, message))
            case Saved(name, time) if message != self.saved:
                self.saved = message  # every node that shares the directory reports it
                context.journal.write(Checkpoint(name, time))
            case CacheUsed():
                self._note_cache(node, message)
            case Sampled():
                self.usage.note(node, message, offset_s)
            case ConnectionsRejected(task, address, count):
                context.journal.write(ConnectionRejected(parse_task_id(task), address, count))
                context.console.warn(render_rejected(message))
            case Status(task, status) if status.progress is not None:
                self.usage.note_epochs(parse_task_id(task), status.progress.epoch_ends, offset_s)
            case Stacks():
                self._stacks.note(message)
            case Profiled():
                self._profiles.note(message)

    def _find_bundle(self, fetch: Fetch) -> Bundle | None:
        return self._context.collector.offered if fetch.checkpoint else self._context.bundle

    def _note_cache(self, node: str, used: CacheUsed) -> None:
        self._context.journal.write(run_events.CompileCache(node, used.loaded, used.stored))
        before = self.compile_cache or CompileCacheReport(loaded=0, stored=0)
        self.compile_cache = CompileCacheReport(loaded=before.loaded + used.loaded, stored=before.stored + used.stored)

    def _overdue(self) -> Iterator[Event]:
        if self._context.console.broken and not self._unread:  # `distlaunch … | head`
            self._unread = True
            yield Interrupted(signal.SIGPIPE)
        yield Tick()


def from_message(node: str, message: Message, clock_offset_s: float = 0.0) -> Event | None:
    """The event for a node's message; None if the message does not matter to the gang.

    Times are converted to the controller's clock; `clock_offset_s` is how far the node's clock is ahead of it.

    Raises:
        ValueError: the message names an impossible task.
    """
    match message:
        case Ready():
            return NodeReady(node)
        case GpusClaimed(_, gpus, busy, problem):
            if problem:
                why = f"cannot tell which GPUs are free: {problem}"
                return NodeRefused(node, (Problem("gpus-unknown", why, "run without --wait-gpus"),))
            return NodeBusy(node, tuple(busy)) if busy else NodeClaimed(node, tuple(gpus))
        case Synced(_, files, fetched, checkpoint, newer):
            return NodeSynced(node, files, fetched, checkpoint, newer)
        case Prepared(_, ports, unguarded):
            return NodePrepared(
                node,
                {parse_task_id(task): port for task, port in ports.items()},
                {parse_task_id(task): why for task, why in unguarded.items()},
            )
        case Inspected():
            return NodeInspected(node)
        case Refused(problems):
            return NodeRefused(node, tuple(problems))
        case Broken(problem):
            return NodeRefused(node, (problem,))
        case Signalled(time):
            return NodeSignalled(node, time - clock_offset_s)
        case Started(task, pid, time, start):
            return TaskStarted(parse_task_id(task), pid, time - clock_offset_s, start)
        case Listening(task, time):
            return TaskListening(parse_task_id(task), time - clock_offset_s)
        case Unguarded(task, why):
            return TaskUnguarded(parse_task_id(task), why)
        case Status(task, status):
            progress = status.progress
            if progress is not None:
                began, at = progress.began - clock_offset_s, progress.time - clock_offset_s
                progress = replace(progress, began=began, time=at, epoch_ends=[])  # they change no decision
            since = status.since - clock_offset_s
            return TaskReported(
                parse_task_id(task),
                status.phase,
                since,
                progress,
                injected=tuple(status.injected),
                strategy=status.strategy,
                own_tf_config=status.own_tf_config,
                own_tf_config_kept=status.own_tf_config_kept,
                own_resolver=status.own_resolver,
                keras=status.keras,
                model=status.model,
                saves_when_preempted=status.saves_when_preempted,
            )
        case Halted(task, signum, time):
            return TaskHalted(parse_task_id(task), signum or None, time - clock_offset_s)
        case InterruptTaken(task):
            return TaskInterrupted(parse_task_id(task))
        case Returned(task, time, crash, start):
            return ProgramEnded(parse_task_id(task), time - clock_offset_s, _shift(crash, clock_offset_s), start)
        case Exited(task, how, time, crash, finished, evidence, start, before_stop):
            crash = _shift(crash, clock_offset_s)
            if finished is not None:
                finished -= clock_offset_s
            time -= clock_offset_s
            return TaskExited(parse_task_id(task), how, time, crash, finished, evidence, start, before_stop)
        case Empty(_, left_behind, killed):
            return NodeEmpty(node, left_behind, killed)
    return None


def _shift(crash: CrashRecord | None, clock_offset_s: float) -> CrashRecord | None:
    return None if crash is None else replace(crash, time=crash.time - clock_offset_s)
