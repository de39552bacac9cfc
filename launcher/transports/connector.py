"""A connector runs one command on a machine and connects its stdin and stdout to this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from launcher.transports.payload import Payload
from launcher.transports.streams import Stream
from worker_entry.protocol.frozen import dataclass, field

FIRST_S = 60.0
"""How long each step of a first connection may take."""
ATTEMPTS = 5
"""How often a first connection is tried if the other side is busy (sshd's MaxStartups)."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The time limits and retries for opening a connection.

    Attributes:
        within_s: the time limit of each step.
        attempts: how often a busy machine is tried.
        cancelled: set when the stream is no longer needed.
        begin: called before anything is started on the machine, as late as possible; may raise LinkError.
        note: gets messages for the user.
    """

    within_s: float = FIRST_S
    attempts: int = ATTEMPTS
    cancelled: threading.Event = field(default_factory=threading.Event)
    begin: Callable[[], None] = lambda: None
    note: Callable[[str], None] = lambda _: None


class Connector(Protocol):
    """Connects to one machine."""

    @property
    def address(self) -> str | None:
        """The address at which other machines may reach this one, if the connector knows it."""

    def open(self, payload: Payload, python: str, opening: Opening) -> Stream:
        """Starts the payload on the machine, with this interpreter.

        Raises:
            LinkError: the machine cannot be reached, or runs no command.
        """
