"""Finds a way back to an agent that is running, again and again, until it answers or its lease is over."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from launcher.transports.base import LinkBroken, LinkError
from launcher.transports.streams import Stream, skip_noise
from worker_entry.protocol.framing import ProtocolError, encode
from worker_entry.protocol.orders import Attach

SHORTEST_TRY_S = 1.0
TRY_S = (3.0, 20.0)
"""A try that takes a third of the lease, within these limits, is given up: what has held it up may be over."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
"""Between two tries; a machine that is in trouble has no use for a new process every second."""


class Reconnector:
    """`reopen` starts a newcomer on the node, within so many seconds; without it, a broken stream is the end."""

    def __init__(self, reopen: Callable[[float], Stream] | None) -> None:
        self._reopen = reopen
        self._given_up = threading.Event()
        self._tried: Stream | None = None
        """A stream whose other end has not answered yet."""

    @property
    def exists(self) -> bool:
        return self._reopen is not None

    @property
    def given_up(self) -> bool:
        return self._given_up.is_set()

    def give_up(self) -> None:
        """It is not looked for any more."""
        self._given_up.set()
        tried = self._tried
        if tried is not None:
            tried.abandon()

    def find(self, broken: LinkBroken, attach: Attach, deadline: float, lease_s: float) -> tuple[Stream, bytes]:
        """A new stream to the same agent, and the first bytes from it.

        Args:
            broken: why it is needed.
            attach: what the agent is sent first.
            deadline: in monotonic seconds, when the lease is over.
            lease_s: how long that was, for the user.

        Raises:
            LinkError: there is none, or none in time.
        """
        pause_s, try_s = FIRST_PAUSE_S, min(max(lease_s / 3, TRY_S[0]), TRY_S[1])
        while True:
            left_s = max(deadline - time.monotonic(), SHORTEST_TRY_S)
            try:
                return self._try(attach, min(left_s, try_s))
            except (LinkError, ProtocolError, OSError) as error:
                latest = error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LinkError(f"{broken}, and there was no way back within {lease_s:g} s: {latest}")
            wait_s = random.uniform(pause_s / 2, pause_s)  # noqa: S311 - it only spreads the attempts
            if self._given_up.wait(min(wait_s, left_s)):
                raise LinkError(str(broken))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _try(self, attach: Attach, within_s: float) -> tuple[Stream, bytes]:
        """That a newcomer starts is not enough: the agent has to answer, and it alone writes the start marker."""
        assert self._reopen is not None
        until = time.monotonic() + within_s
        stream = self._tried = self._reopen(within_s)
        try:
            if self.given_up:  # meanwhile, when there was nothing to abandon yet
                stream.abandon()
            stream.write(encode(attach))
            left_s = max(until - time.monotonic(), SHORTEST_TRY_S)
            return stream, skip_noise(stream, left_s, "the agent does not answer")
        except BaseException:
            stream.abandon()
            raise
        finally:
            self._tried = None
