"""Starts an agent on another machine: runs one command there, and exchanges frames over its stdin and stdout."""

from __future__ import annotations

import threading
from collections.abc import Callable

from launcher.clock import SystemTiming, Timing
from launcher.transports.base import Deliver, FileSink, LinkError, LinkNote, Resumption
from launcher.transports.connector import Connector, Opening
from launcher.transports.payload import make_payload
from launcher.transports.resumable_link import ResumableLink
from launcher.transports.streams import Stream, ask
from worker_entry.protocol.messages import Cleaned
from worker_entry.protocol.orders import VERSION, Clean

END_WAIT_S = 15.0
"""How long an agent may take to stop: its grace for the tasks, and the round trip."""
LAST_TRY_S = 5.0
"""How long one more connection may take when a node's agent is silent."""
END_BY_GUARDIAN_S = 25.0
"""How long the guardian may then take to clean the node."""


class RemoteTransport:
    """A machine with Python. `python` is its interpreter, found on its PATH.

    `run_id`: the run of its agents. `may_stay`: whether an agent may be kept for another run. `timing`: the clock and
    the threads of its links.
    """

    shares_files = False

    def __init__(
        self,
        connector: Connector,
        python: str,
        *,
        run_id: str = "",
        may_stay: bool = False,
        timing: Timing | None = None,
    ) -> None:
        self._timing = timing or SystemTiming()
        self._connector = connector
        self._python = python
        self._run_id = run_id
        self._verb = "warm-node" if may_stay else "node"

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> ResumableLink:
        agent = _Agent(
            self._connector, self._python, self._verb, self._run_id, self._timing, began=resumption is not None
        )
        return ResumableLink(
            node,
            lambda: agent.open(lambda text: deliver(node, LinkNote(text))),
            deliver,
            mirror,
            lease_s=lease_s,
            reopen=agent.reopen,
            end=agent.end,
            resumption=resumption,
            run_id=self._run_id,
            timing=self._timing,
        )


class _Agent:
    """An agent on another machine, from the first attempt to connect."""

    def __init__(
        self, connector: Connector, python: str, verb: str, run_id: str, timing: Timing, *, began: bool
    ) -> None:
        self._connector = connector
        self._python = python
        self._verb = verb
        self._run_id = run_id
        self._timing = timing
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._began = began

    def open(self, note: Callable[[str], None]) -> Stream:
        """Starts it; `note` gets messages for the user."""
        opening = Opening(cancelled=self._cancelled, begin=self._begin, note=note)
        return self._connector.open(make_payload(self._verb), self._python, opening)

    def reopen(self, within_s: float) -> Stream:
        """Connects to it again."""
        opening = Opening(within_s=within_s, attempts=1, cancelled=self._cancelled, begin=self._begin)
        return self._connector.open(make_payload("attach"), self._python, opening)

    def end(self, link: ResumableLink) -> int | None:
        """Stops it; see `Link.close`."""
        with self._lock:
            self._cancelled.set()
            if not self._began:
                return 0  # nothing was started on the node
        if not link.began:
            link.abandon()  # an agent that is still starting finds its stdin closed, and ends
            return 0
        link.finish()
        if not link.join(END_WAIT_S):
            link.abandon()
        if link.taken_over:
            return None
        return 0 if link.ended or self._end_by_guardian(link) else None

    def _end_by_guardian(self, link: ResumableLink) -> bool:
        """Has the guardian stop an unreachable agent, over a new connection; returns whether nothing is left."""
        if link.reattach_folder is None:
            return False
        run_ids = [self._run_id] if self._run_id else []
        order = Clean(VERSION, run_ids, link.reattach_folder, link.generation, process_view=link.process_view)
        try:
            stream = self._connector.open(make_payload("clean"), self._python, Opening(within_s=LAST_TRY_S, attempts=1))
            answer = ask(stream, order, END_BY_GUARDIAN_S, timing=self._timing)
        except LinkError:
            return False
        return isinstance(answer, Cleaned) and not answer.left

    def _begin(self) -> None:
        """Notes that something may be started on the node, which `end` has to wait for."""
        with self._lock:
            if self._cancelled.is_set() and not self._began:
                raise LinkError("the run ended before the connection was established")
            self._began = True
