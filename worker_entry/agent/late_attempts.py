"""Makes an agent's attempts only when an order needs them: most of the agent's modules are for running tasks."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING, Optional

from worker_entry.protocol.messages import Message

if TYPE_CHECKING:
    from worker_entry.agent.tasks.attempt import Attempts
    from worker_entry.agent.warm.kept_forkserver import KeptForkserver


class LateAttempts:
    """An agent's attempts, if there are any yet.

    Args:
        selector: the agent's.
        send: sends a message to the controller.
        forkserver: an earlier run's. With one, or with news of one, the attempts are made at once.
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
        self._owned = contextlib.ExitStack()
        self._made = self._make(forkserver, news) if forkserver is not None or news else None

    @property
    def exist(self) -> bool:
        return self._made is not None

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
            self._made = self._make(None, "")
        return self._made

    def stop(self, grace_s: float) -> None:
        """Begins to stop what runs, if anything does."""
        if self._made is not None:
            self._made.stop(grace_s)

    def close(self) -> None:
        """Releases what they hold."""
        self._owned.close()

    def _make(self, forkserver: Optional[KeptForkserver], news: str) -> Attempts:
        from worker_entry.agent.tasks.attempt import Attempts
        from worker_entry.agent.tasks.forkserver import ForkserverClient

        client = ForkserverClient(self._selector, forkserver, news)
        self._owned.callback(client.end)
        attempts = Attempts(self._selector, self._send, client)
        self._owned.callback(attempts.close)
        return attempts
