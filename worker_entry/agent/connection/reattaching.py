"""How an agent takes a new connection, from its controller after the old one broke, or from a new controller."""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Optional, Union

from worker_entry.agent.connection.connection import Connection
from worker_entry.agent.connection.reattach import ReattachFolder
from worker_entry.agent.connection.reattach_calls import Reattachment, receive_call
from worker_entry.protocol.framing import ProtocolError
from worker_entry.protocol.orders import TAKEN_OVER, Attach, Goodbye
from worker_entry.protocol.values import Problem

if TYPE_CHECKING:
    from worker_entry.agent.tasks.attempt import Attempts

LOOK_S = 1.0
"""How often an agent checks that its folder is there."""


class Reattaching:
    """The agent's side of its reattach folder, whose socket it opens; has `on_call` called for each caller."""

    def __init__(
        self,
        folder: ReattachFolder,
        connection: Connection,
        find_attempts: Callable[[], Attempts],
        selector: selectors.BaseSelector,
        on_call: Callable[[], None],
    ) -> None:
        folder.listen()
        selector.register(folder, selectors.EVENT_READ, on_call)
        self._selector = selector
        self._on_call = on_call
        self._folder = folder
        self._connection = connection
        self._find_attempts = find_attempts
        self._generation = 0
        """The controller's."""
        self._look_due = 0.0

    def keep_folder(self) -> None:
        """Makes the folder again if something has removed it, for example a cleaner of /dev/shm."""
        if time.monotonic() < self._look_due:
            return
        self._look_due = time.monotonic() + LOOK_S
        if not self._folder.is_intact():
            self._selector.unregister(self._folder)
            with contextlib.suppress(OSError):  # tried again
                self._folder.ensure()
            self._selector.register(self._folder, selectors.EVENT_READ, self._on_call)

    def accept(self, run_id: Optional[str], *, gone: bool) -> Union[Attach, Goodbye, None]:
        """Takes the connection that waits; returns its Attach, Goodbye if the agent is asked to end, or None.

        Args:
            run_id: the agent's run; None before Hello.
            gone: whether the agent has given up its controller.
        """
        reattachment = receive_call(self._folder.accept())
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
