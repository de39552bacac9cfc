"""How an agent takes a new connection, from its controller after the old one broke, or from a new controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Optional, Union

from worker_entry.agent.connection import Connection
from worker_entry.agent.reattach import ReattachFolder, Reattachment
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.orders import TAKEN_OVER, Attach, Goodbye
from worker_entry.protocol.values import Problem

if TYPE_CHECKING:
    from worker_entry.agent.attempts import Attempts


class Reattaching:
    """The agent's side of its reattach folder, whose socket it opens."""

    def __init__(self, folder: ReattachFolder, connection: Connection, find_attempts: Callable[[], Attempts]) -> None:
        folder.listen()
        self._folder = folder
        self._connection = connection
        self._find_attempts = find_attempts
        self._generation = 0
        """The controller's."""

    def accept(self, run_id: Optional[str], *, gone: bool) -> Union[Attach, Goodbye, None]:
        """Takes the connection that waits; returns its Attach, Goodbye if the agent is asked to end, or None.

        Args:
            run_id: the agent's run; None before Hello.
            gone: whether the agent has given up its controller.
        """
        reattachment = self._folder.accept()
        if not isinstance(reattachment, Reattachment):
            return reattachment
        if gone or not reattachment.take():
            reattachment.leave()
            return None
        attach, outbox = reattachment.attach, self._connection.outbox
        if attach.generation < self._generation:
            reattachment.refuse(Problem(TAKEN_OVER, "another controller has taken over the run"))
            return None
        try:
            self._check(attach, run_id)
            # A controller does not record every frame that it handles, but it has handled all that it confirmed.
            received = max(attach.received, outbox.confirmed) if attach.takeover else attach.received
            attempts = self._find_attempts()
            attempts.resume(received, outbox)
            self._connection.replace(reattachment, received)
        except ProtocolError as error:
            reattachment.refuse(Problem("protocol-error", f"the agent was sent {error}"))
            return None
        attempts.rewind(attach)
        if attach.takeover:
            self._generation = attach.generation
            self._folder.note_generation(attach.generation)
            attempts.report_again()
        return attach

    def _check(self, attach: Attach, run_id: Optional[str]) -> None:
        """Raises ProtocolError if the sender is not the controller of this agent, or its successor."""
        if run_id is None or attach.run_id not in ("", run_id):
            raise ProtocolError("an Attach to another run")
        # A takeover of the same generation comes again if its answer was lost.
        if attach.generation == 0 if attach.takeover else attach.generation != self._generation:
            raise ProtocolError(f"an Attach of generation {attach.generation} after {self._generation}")
