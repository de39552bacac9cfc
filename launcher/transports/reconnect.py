"""Reconnects to a running agent: tries until the agent answers or its lease expires."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from launcher.clock import SystemTiming, Timing
from launcher.transports.base import GoneError, LinkBroken, LinkError
from launcher.transports.streams import Stream, bring_archive, skip_noise
from worker_entry.protocol.framing import ProtocolError, encode
from worker_entry.protocol.orders import Attach

SHORTEST_TRY_S = 1.0
TRY_S = (3.0, 20.0)
"""A try is abandoned after a third of the lease, within these limits: its obstacle may be gone by the next try."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
"""The longest pause between two tries; a machine with problems should not get a new process every second."""
SILENT = "the agent does not answer"


class Reconnector:
    """`reopen` starts a reattachment on the node, within the given seconds; without it, a broken stream is final."""

    def __init__(self, reopen: Callable[[float], Stream] | None, timing: Timing | None = None) -> None:
        self._reopen = reopen
        self._timing = timing or SystemTiming()
        self._given_up = self._timing.make_event()
        self._tried: Stream | None = None
        """A stream whose agent has not answered yet."""

    @property
    def exists(self) -> bool:
        return self._reopen is not None

    @property
    def given_up(self) -> bool:
        return self._given_up.is_set()

    def give_up(self) -> None:
        """Stops trying."""
        self._given_up.set()
        tried = self._tried
        if tried is not None:
            tried.abandon()

    def find(self, broken: LinkBroken, attach: Attach, deadline: float, lease_s: float) -> tuple[Stream, bytes]:
        """A new stream to the same agent, and the first bytes from it.

        Args:
            broken: why a new stream is needed.
            attach: the first frame to the agent.
            deadline: when the lease expires, in monotonic seconds.
            lease_s: the lease, for the error.

        Raises:
            LinkError: the agent is gone, or no try succeeded in time.
        """
        pause_s, try_s = FIRST_PAUSE_S, min(max(lease_s / 3, TRY_S[0]), TRY_S[1])
        while True:
            try:
                return self._try(attach, min(self._left_s(deadline), try_s))
            except GoneError:
                raise
            except (LinkError, ProtocolError, OSError) as error:
                latest = error
            left_s = deadline - self._timing.monotonic()
            if left_s <= 0:
                raise LinkError(f"{broken}, and not reconnected within {lease_s:g} s: {latest}")
            if self._given_up.wait(min(self._timing.jitter(pause_s), left_s)):
                raise LinkError(str(broken))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _try(self, attach: Attach, within_s: float) -> tuple[Stream, bytes]:
        """A stream on which the agent itself answers: only the agent writes the start marker, no reattachment does."""
        assert self._reopen is not None
        until = self._timing.monotonic() + within_s
        stream = self._tried = self._reopen(within_s)
        try:
            if self.given_up:  # while `reopen` ran, when there was nothing to abandon
                stream.abandon()
            bring_archive(stream, self._left_s(until), SILENT, timing=self._timing)
            with contextlib.suppress(BrokenPipeError):  # the reattachment has ended, and says why
                stream.write(encode(attach))
            return stream, skip_noise(stream, self._left_s(until), SILENT, timing=self._timing)
        except BaseException:
            stream.abandon()
            raise
        finally:
            self._tried = None

    def _left_s(self, until: float) -> float:
        """How long a step of a try may take."""
        return max(until - self._timing.monotonic(), SHORTEST_TRY_S)
