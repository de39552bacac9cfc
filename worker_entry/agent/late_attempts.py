"""Makes an agent's attempts only when an order needs them: most of the agent's modules are for running tasks."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

from worker_entry.protocol.messages import Message

if TYPE_CHECKING:
    from worker_entry.agent.attempts import Attempts
    from worker_entry.agent.warm.kept_forkserver import KeptForkserver


class LateAttempts:
    """An agent's attempts, if there are any yet.

    Args:
        selector: the agent's.
        send: sends a message to the controller.
        forkserver: an earlier run's.
        news: why there is none although one was kept.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[Message], None],
        forkserver: Optional[KeptForkserver],
        news: str,
    ) -> None:
        self._selector = selector
        self._send = send
        self._kept = forkserver
        self._news = news
        self._owned = contextlib.ExitStack()
        self._made: Optional[Attempts] = None

    @property
    def exist(self) -> bool:
        """Whether there are any, or have to be because of an earlier run's forkserver."""
        return self._made is not None or self._kept is not None or bool(self._news)

    @property
    def is_stopping(self) -> bool:
        return self._made is not None and self._made.is_stopping

    @property
    def is_busy(self) -> bool:
        return self._made is not None and self._made.is_busy

    @property
    def has_tasks(self) -> bool:
        return self._made is not None and self._made.has_tasks

    def get(self) -> Attempts:
        """The attempts; makes them at the first call."""
        if self._made is None:
            from worker_entry.agent.attempts import Attempts
            from worker_entry.agent.forkserver_client import ForkserverClient

            forkserver = ForkserverClient(self._selector, self._kept, self._news)
            self._owned.callback(forkserver.end)
            self._made = Attempts(self._selector, self._send, forkserver)
            self._owned.callback(self._made.close)
        return self._made

    def stop(self, grace_s: float) -> None:
        """Begins to stop what runs, if anything does."""
        if self._made is not None:
            self._made.stop(grace_s)

    def close(self) -> None:
        """Releases what they hold."""
        if self.exist:
            self.get()  # so that an earlier run's forkserver ends
        self._owned.close()
