"""A warm agent between two runs: it waits for the next run's connection, or for its end.

It ends when its time is over, when it is asked to, when a signal arrives (as at a logout), when memory runs out, and
when the next run needs something that it does not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from typing import Any, Optional

from worker_entry.agent.connection.connection import Opening
from worker_entry.agent.connection.lease import LoopCounter
from worker_entry.agent.connection.reattach_calls import HAND_OVER_S
from worker_entry.agent.connection.reattach_folder import ReattachFolder
from worker_entry.agent.tasks.warm_forkserver import WarmForkserver
from worker_entry.agent.warm.fingerprint import find_difference
from worker_entry.agent.warm.rendezvous import END, WaitingSocket, receive_line
from worker_entry.system import clock
from worker_entry.system.memory import MemoryPressure, restore_score, yield_first
from worker_entry.system.peer import is_ours
from worker_entry.system.signal_wakeup import wake_on_signals

TICK_S = 1.0
DESCRIPTORS = 3


class Waiting:
    """One wait.

    Args:
        kept: the forkserver; the caller ends it if no run comes.
        until: when the wait ends, in seconds since 1970.
        waiting: the socket on which it waits.
        folder: the agent's reattach folder.
        fingerprint: of the process in which the agent was started.
    """

    def __init__(
        self,
        kept: WarmForkserver,
        until: float,
        waiting: WaitingSocket,
        folder: ReattachFolder,
        fingerprint: dict[str, str],
    ) -> None:
        self._kept = kept
        self._until = until
        self._waiting = waiting
        self._folder = folder
        self._fingerprint = fingerprint
        self._ended = False

    def wait(self, loop_counter: LoopCounter) -> Optional[Opening]:
        """The next run's connection, whose environment and working directory this process now has; None: none came."""
        with contextlib.ExitStack() as owned:
            owned.callback(self._waiting.close)
            os.chdir(os.sep)  # the last run's disks can then be unmounted
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            scores = [(pid, yield_first(pid)) for pid in (os.getpid(), self._kept.pid)]
            opening = self._wait(loop_counter)
            restored = [restore_score(pid, score) for pid, score in scores]
            if opening is not None and not all(restored):
                opening.refuse("its OOM score cannot be restored")
                return None
            if opening is not None:
                # Answered only when the place is free: this agent may need it again as soon as the run has ended.
                owned.close()
                with contextlib.suppress(OSError):
                    self._folder.ensure()
                opening.accept(self._folder.path)
        return opening

    def _wait(self, loop_counter: LoopCounter) -> Optional[Opening]:
        wake = wake_on_signals(self._note_end)
        pressure = MemoryPressure()
        latest = time.monotonic() + self._until - time.time()
        with selectors.DefaultSelector() as selector:
            for source in (wake, self._waiting, self._kept.control):
                selector.register(source, selectors.EVENT_READ, source)
            while not self._ended and time.time() < self._until and time.monotonic() < latest:
                loop_counter.advance(0.0)
                ready = {key.data for key, _ in selector.select(TICK_S)}
                if self._kept.control in ready:  # it never sends unasked, so it has ended
                    return None
                if self._waiting in ready:
                    return self._receive(self._waiting.accept())
                if pressure.exists():
                    return None
                if not self._waiting.is_intact():
                    selector.unregister(self._waiting)
                    if not self._waiting.take_again():
                        return None
                    selector.register(self._waiting, selectors.EVENT_READ, self._waiting)
        return None

    def _note_end(self) -> None:
        self._ended = True

    def _receive(self, call: socket.socket) -> Optional[Opening]:
        """The connection of a caller that this agent can serve."""
        descriptors: list[int] = []
        try:
            if not is_ours(call):
                raise PermissionError("another user")
            call.settimeout(HAND_OVER_S)
            words, descriptors, _, _ = socket.recv_fds(call, 1 << 16, DESCRIPTORS)
            words = receive_line(call, words)
            order: dict[str, Any] = {} if words == END else json.loads(words)
            stdin, stdout, stderr = descriptors
            opening = Opening(stdin, stdout, call, outlives=order["outlives"])
            difference = find_difference(self._fingerprint, order["fingerprint"])
            os.chdir(order["cwd"])
        except (OSError, ValueError, KeyError, TypeError):
            for descriptor in descriptors:
                os.close(descriptor)
            call.close()
            return None
        if difference:
            os.close(stderr)
            opening.refuse(f"different {difference} than in the last run")
            return None
        os.environ.clear()
        os.environ.update(order["environ"])
        clock.follow_environ()
        os.dup2(stderr, 2)
        os.close(stderr)
        call.settimeout(None)
        return opening
