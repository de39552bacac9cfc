"""What the logs of running tasks tell where nobody else does: who has found the leader, and that something goes on."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.gang.events import Event, LeaderWaits, TaskWrote
from launcher.gang.not_joined import parse_stragglers
from launcher.gang.state import Gang, Phase
from launcher.plan.paths import RunPaths
from launcher.run.log_tails import find_size, read_head
from launcher.tasks import TaskId, find_leader

LOOK_S = 0.2
"""How often logs are looked at."""
SILENCE_S = 1.0
"""A leader that says nothing for so long after all ports have opened is one that is told to say little."""


class LogWatch:
    """Looks at the logs of one attempt, again and again."""

    def __init__(self, files: RunPaths, attempt: int) -> None:
        self._files = files
        self._attempt = attempt
        self._sizes: dict[TaskId, int] = {}
        self._looked = self._joined = 0.0

    def look(self, gang: Gang, now: float) -> Iterator[Event]:
        """What is new, of a cluster that forms, or of one whose steps nobody tells; `now`: monotonic seconds."""
        if now < self._looked + LOOK_S:
            return
        if gang.phase is Phase.FORMING and gang.rules.strategy.collective:
            self._looked = now
            yield from self._see_leader(gang, now)
        elif gang.phase is Phase.RUNNING and gang.rules.stall_s:
            self._looked = now
            yield from self._see_output(gang)

    def _see_leader(self, gang: Gang, now: float) -> Iterator[Event]:
        unheard: frozenset[TaskId] | None = frozenset()
        if len(gang.rules.forming) > 1:
            leader = find_leader(gang.rules.forming)
            if leader is None or leader not in gang.started:
                return
            unheard = parse_stragglers(read_head(self._files.log(self._attempt, leader)))
        if gang.missing or not self._joined:
            self._joined = now
        elif unheard is None and now - self._joined > SILENCE_S:
            unheard = frozenset()
        if unheard != gang.unheard:
            yield LeaderWaits(unheard)

    def _see_output(self, gang: Gang) -> Iterator[Event]:
        for task in gang.rules.tasks:
            size = find_size(self._files.log(self._attempt, task))
            if size != self._sizes.get(task, 0):
                self._sizes[task] = size
                yield TaskWrote(task)
