"""The waits between two attempts. During a wait, the links are still read; a signal ends the wait.

What is read is for the next attempt, except for what tasks of the last attempt still say.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.controller.attempt import IDLE_S
from launcher.controller.context import AttemptSetup, RunContext
from launcher.controller.links import Incoming
from launcher.controller.node_choice import NodeChoice
from launcher.controller.recovery import Recover, ReturnWatch
from launcher.gang.events import EndAnnounced, FilesAsked, ProfileAsked, StacksAsked
from launcher.transports.base import LinkClosed
from launcher.verdict.models import Verdict
from launcher.wording import render_duration
from worker_entry.protocol.messages import Signalled

KEPT = (LinkClosed, Signalled, EndAnnounced, StacksAsked, ProfileAsked, FilesAsked)


class Pauses:
    """The waits of one run.

    Args:
        context: the context of the run.
        nodes: knows which nodes are lost.
        recover: cleans a lost node; returns whether the node can be used again.
        is_wanted: whether the run goes on; if not, every wait ends.
    """

    def __init__(self, context: RunContext, nodes: NodeChoice, recover: Recover, is_wanted: Callable[[], bool]) -> None:
        self._context = context
        self._timing = context.timing
        self._nodes = nodes
        self._recover = recover
        self._is_wanted = is_wanted
        self._kept: list[Incoming] = []
        """What was read, for the next attempt."""

    @property
    def announced(self) -> EndAnnounced | None:
        """The announced end of all nodes, if the engine has announced it during a wait."""
        ends = [event for event in self._kept if isinstance(event, EndAnnounced) and event.reference]
        return next((end for end in ends if not end.stays and not end.replaced), None)

    def hand_over(self) -> None:
        """Gives what was read to the next attempt, so that it sees losses, announcements and requests."""
        for incoming in self._kept:
            self._context.links.put(incoming)
        self._kept = []

    def fence(self, why: Verdict) -> None:
        """Waits until the tasks of lost nodes have certainly ended; otherwise, two chiefs could write one checkpoint.

        Args:
            why: the verdict on the last attempt.
        """
        now = self._timing.monotonic()
        fences = {node: until for node, until in self._nodes.find_fences().items() if until > now}
        wait_s = max(fences.values(), default=now) - now
        if wait_s > 0:
            names = ", ".join(sorted(fences))
            self._note_state(why)
            self._context.console.note(
                f"Tasks may still run on {names}; waiting {wait_s:.0f} s until they have certainly ended"
            )
            self.pause(wait_s)

    def await_return(self, limit_s: float, why: Verdict) -> AttemptSetup | None:
        """Waits for lost nodes; returns a setup that includes them, None after the time limit or a signal."""
        names = ", ".join(sorted(self._nodes.lost))
        self._note_state(why)
        self._context.console.note(f"No spare node is left; waiting up to {limit_s:g} s for {names} to come back")
        started = self._timing.monotonic()
        watch, chosen = ReturnWatch(self._nodes.lost, self._recover, self._timing), None
        while chosen is None and self._goes_on() and self._timing.monotonic() < started + limit_s:
            self.pause(IDLE_S)
            self._nodes.take_back(watch.back, proven=watch.proven)
            chosen = self._nodes.choose()
        watch.close()
        if chosen is not None:
            self._context.console.note(
                f"{', '.join(sorted(watch.back))}: back after {render_duration(self._timing.monotonic() - started)}"
            )
        return chosen

    def pause(self, seconds: float) -> None:
        """Waits this long and reads the links; returns early if the run is not wanted, or loses all of its nodes."""
        until = self._timing.monotonic() + seconds
        while self._goes_on() and (left_s := until - self._timing.monotonic()) > 0:
            self._context.journal.touch()
            incoming = self._context.links.next(min(left_s, IDLE_S))
            if isinstance(incoming, tuple):
                self._context.collector.note(*incoming)
            if isinstance(incoming[1] if isinstance(incoming, tuple) else incoming, KEPT):
                assert incoming is not None
                self._kept.append(incoming)

    def _goes_on(self) -> bool:
        return self._is_wanted() and self.announced is None

    def _note_state(self, why: Verdict) -> None:
        self._context.journal.note_state("waiting", why.reference, why.message)
