"""Counts what a node sends against what it may send (`costs.COSTS`)."""

from __future__ import annotations

from worker_entry.protocol.costs import cost_of
from worker_entry.protocol.messages import Message


class Bucket:
    """A token bucket: holds `size` at first, refills with `per_s`, and never holds more than `size`."""

    def __init__(self, size: float, per_s: float, now: float) -> None:
        self._size = self._level = size
        self._per_s = per_s
        self._filled = now

    def take(self, amount: float, now: float) -> bool:
        """Takes the amount if the bucket holds it; returns whether it did. `now`: seconds of any clock."""
        self._level = min(self._size, self._level + max(now - self._filled, 0.0) * self._per_s)
        self._filled = now
        if self._level < amount:
            return False
        self._level -= amount
        return True


class Allowances:
    """The messages that one node may still send in an attempt; `tasks`: the number of its tasks."""

    def __init__(self, tasks: int, now: float) -> None:
        self._tasks = max(tasks, 1)
        self._began = now
        self._buckets: dict[type[Message], Bucket] = {}
        self.refused = 0
        """The number of messages beyond the allowances."""

    def take(self, message: Message, now: float) -> bool:
        """Counts a message; returns whether the node may send it. `now`: monotonic seconds."""
        kind = type(message)
        cost = cost_of(kind)
        if cost.at_once is None:
            return True
        if kind not in self._buckets:
            times = self._tasks if cost.for_each_task else 1
            self._buckets[kind] = Bucket(cost.at_once * times, cost.per_minute * times / 60, self._began)
        is_allowed = self._buckets[kind].take(1, now)
        self.refused += not is_allowed
        return is_allowed
