"""Starts an agent on another machine: runs one command there, and exchanges frames over its stdin and stdout."""

from __future__ import annotations

import threading

from launcher.transports.base import Deliver, FileSink, LinkError, LinkNote, Resumption
from launcher.transports.connector import Connector, Opening
from launcher.transports.framed_link import FramedLink
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

    `run_id`: the run of its agents. `may_stay`: whether an agent may be kept for another run.
    """

    shares_files = False

    def __init__(self, connector: Connector, python: str, *, run_id: str = "", may_stay: bool = False) -> None:
        self._connector = connector
        self._python = python
        self._run_id = run_id
        self._verb = "warm-node" if may_stay else "node"

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> RemoteLink:
        return RemoteLink(
            node=node,
            connector=self._connector,
            python=self._python,
            verb=self._verb,
            deliver=deliver,
            mirror=mirror,
            lease_s=lease_s,
            resumption=resumption,
            run_id=self._run_id,
        )


class RemoteLink(FramedLink):
    """The link to a node, from the first attempt to connect; its own thread makes the connections."""

    def __init__(
        self,
        *,
        node: str,
        connector: Connector,
        python: str,
        verb: str,
        deliver: Deliver,
        mirror: FileSink,
        lease_s: float,
        resumption: Resumption | None = None,
        run_id: str = "",
    ) -> None:
        self._run_id = run_id
        self._connector = connector
        self._python = python
        self._closing = threading.Event()
        self._opening = Opening(
            cancelled=self._closing, begin=self._begin, note=lambda text: deliver(node, LinkNote(text))
        )
        self._lock = threading.Lock()
        self._began = resumption is not None
        self._frames = ResumableLink(
            node,
            lambda: self._connector.open(make_payload(verb), python, self._opening),
            deliver,
            mirror,
            lease_s=lease_s,
            reopen=self._reopen,
            resumption=resumption,
            run_id=run_id,
        )

    def close(self) -> int | None:
        with self._lock:
            self._closing.set()
            if not self._began:
                return 0  # nothing was started on the node
        if not self._frames.began:
            self._frames.give_up()  # an agent that is still starting finds its stdin closed, and ends
            return 0
        self._frames.finish()
        if not self._frames.join(END_WAIT_S):
            self._frames.give_up()
        if self._frames.taken_over:
            return None
        return 0 if self._frames.ended or self._end_by_guardian() else None

    def _end_by_guardian(self) -> bool:
        """Has the guardian stop an unreachable agent, over a new connection; returns whether nothing is left."""
        frames = self._frames
        if frames.reattach_folder is None:
            return False
        run_ids = [self._run_id] if self._run_id else []
        order = Clean(VERSION, run_ids, frames.reattach_folder, frames.generation, process_view=frames.process_view)
        try:
            stream = self._connector.open(make_payload("clean"), self._python, Opening(within_s=LAST_TRY_S, attempts=1))
            answer = ask(stream, order, END_BY_GUARDIAN_S)
        except LinkError:
            return False
        return isinstance(answer, Cleaned) and not answer.left

    def _reopen(self, within_s: float) -> Stream:
        opening = Opening(within_s=within_s, attempts=1, cancelled=self._closing, begin=self._begin)
        return self._connector.open(make_payload("attach"), self._python, opening)

    def _begin(self) -> None:
        """Notes that something may be started on the node, which `close` has to wait for."""
        with self._lock:
            if self._closing.is_set() and not self._began:
                raise LinkError("the run ended before the connection was established")
            self._began = True
