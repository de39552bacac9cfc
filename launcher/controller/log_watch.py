"""Facts that only task logs show: which tasks the leader has found, and whether a task still writes."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.gang.events import Event, LeaderWaits, TaskWrote
from launcher.gang.not_joined import parse_not_joined
from launcher.gang.state import AttemptState, Phase
from launcher.plan.paths import RunPaths
from launcher.rundir.log_tails import find_size, read_head
from launcher.tasks import TaskId, find_leader

POLL_S = 0.2
"""How often logs are read."""
SILENCE_S = 1.0
"""If the leader logs nothing for this long after all ports have opened, its log level is reduced."""


class LogWatch:
    """The polling of one attempt's logs."""

    def __init__(self, files: RunPaths, attempt: int) -> None:
        self._files = files
        self._attempt = attempt
        self._sizes: dict[TaskId, int] = {}
        self._polled = self._joined = 0.0

    def poll(self, state: AttemptState, now: float) -> Iterator[Event]:
        """Events of a forming cluster, or of a running one that may stall; `now`: monotonic seconds."""
        if now < self._polled + POLL_S:
            return
        if state.phase is Phase.FORMING and state.policy.strategy.collective:
            self._polled = now
            yield from self._read_leader(state, now)
        elif state.phase is Phase.RUNNING and state.policy.stall_s:
            self._polled = now
            yield from self._check_sizes(state)

    def _read_leader(self, state: AttemptState, now: float) -> Iterator[Event]:
        not_joined: frozenset[TaskId] | None = frozenset()
        if len(state.policy.forming) > 1:
            leader = find_leader(state.policy.forming)
            if leader is None or leader not in state.started:
                return
            not_joined = parse_not_joined(read_head(self._files.log(self._attempt, leader)))
        if state.missing or not self._joined:
            self._joined = now
        elif not_joined is None and now - self._joined > SILENCE_S:
            not_joined = frozenset()
        if not_joined != state.not_joined:
            yield LeaderWaits(not_joined)

    def _check_sizes(self, state: AttemptState) -> Iterator[Event]:
        for task in state.policy.tasks:
            size = find_size(self._files.log(self._attempt, task))
            if size != self._sizes.get(task, 0):
                self._sizes[task] = size
                yield TaskWrote(task)
