"""The way of one node's messages to the controller: each is checked here, and waits here while too many are unread.

A node speaks for its own tasks, in attempts that have begun. Which fields of a message say so is in their types
(`limits.OfSender`, `limits.OfAttempt`), so that no message can be forgotten.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.tasks import TaskId
from launcher.transports.base import LinkNews, LogMirror
from worker_entry.protocol.field_limits import OfAttempt, OfSender
from worker_entry.protocol.framing import ProtocolError, marked
from worker_entry.protocol.messages import Log, Message, Noted

UNREAD_MESSAGES = 1000
UNREAD_BYTES = 4 << 20
"""Of one node; above either, its link is not read further. The node keeps the rest, on its disk."""
NOTES = 100
"""Lines for the user that one node has in an attempt."""


@dataclass(frozen=True)
class Placement:
    """The attempt under way, and the names of the tasks that its plan has placed on each node."""

    attempt: int = 0
    tasks: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, attempt: int, nodes: Mapping[str, Collection[TaskId]]) -> Placement:
        return cls(attempt, {node: frozenset(map(str, tasks)) for node, tasks in nodes.items()})

    def check(self, node: str, message: Message) -> None:
        """Raises ProtocolError if the message is not for this node to send."""
        kind = type(message)
        for number in marked(kind, message, OfAttempt):
            if number > self.attempt:
                raise ProtocolError(f"{kind.__name__} of attempt {number}, which has not begun")
        for task in marked(kind, message, OfSender):
            if task not in self.tasks.get(node, ()):
                raise ProtocolError(f"{kind.__name__} of {task}, which is not one of its tasks")


@dataclass(frozen=True)
class Arrived:
    """What a node has sent, and under which placement it was checked; it has to be given back to its inlet."""

    inbox: Inbox
    message: Message | LinkNews
    placement: Placement
    weight: int

    @property
    def is_late(self) -> bool:
        """Whether it speaks of tasks of an attempt that is over."""
        is_old = self.placement is not self.inbox.placement()
        return is_old and any(True for _ in marked(type(self.message), self.message, OfSender))


class Inbox:
    """Takes what a link reads: messages by `deliver`, pieces of logs by `write`, both from the link's thread.

    Args:
        node: whose inlet it is.
        placement: tells the one under way.
        mirror: where pieces of logs go.
        put: takes what has been checked; `release` says that it has been read.
    """

    def __init__(
        self, node: str, placement: Callable[[], Placement], mirror: LogMirror, put: Callable[[Arrived], None]
    ) -> None:
        self.node = node
        self.placement = placement
        self._mirror = mirror
        self._put = put
        self._changed = threading.Condition()
        self._unread = [0, 0]
        """Messages, and their bytes."""
        self._notes: Counter[int] = Counter()
        """How much it has told the user in each attempt."""
        self._closed = False

    def deliver(self, node: str, message: Message | LinkNews) -> None:
        """Waits while too much is unread.

        Raises:
            ProtocolError: the message is not for this node to send.
        """
        assert node == self.node
        placement = self.placement()
        weight = 0
        if not isinstance(message, LinkNews):
            placement.check(node, message)
            if isinstance(message, Noted):
                self._notes[placement.attempt] += 1
                if self._notes[placement.attempt] > NOTES:
                    return
                if self._notes[placement.attempt] == NOTES:
                    message = Noted("more that it has to say is not shown")
            weight = weigh(message)
            with self._changed:
                if not self._has_room(weight):  # until there is much, or both threads would take turns at each message
                    self._changed.wait_for(lambda: self._has_room(weight, 2))
                if self._closed:
                    return
                self._unread = [self._unread[0] + 1, self._unread[1] + weight]
        self._put(Arrived(self, message, placement, weight))

    def write(self, frame: Log, data: bytes) -> bool:
        """Writes a piece of a log; one of an attempt that is over is dropped.

        Raises:
            ProtocolError: the piece is not for this node to send.
            OSError: it cannot be written.
        """
        placement = self.placement()
        if frame.attempt < placement.attempt:
            return False
        placement.check(self.node, frame)
        return self._mirror.write(frame, data)

    def release(self, arrived: Arrived) -> None:
        if not isinstance(arrived.message, LinkNews):
            with self._changed:
                self._unread = [self._unread[0] - 1, self._unread[1] - arrived.weight]
                if self._has_room(0, 2):
                    self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is wanted: what waits, and what still comes, is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, weight: int, part: int = 1) -> bool:
        """Whether a message of this weight keeps within the bounds, or within that part of them."""
        messages, bytes_ = self._unread
        room = messages < UNREAD_MESSAGES // part and bytes_ + weight <= UNREAD_BYTES // part
        return self._closed or not messages or room


def weigh(value: Any) -> int:
    """About the bytes that a message takes in memory."""
    if isinstance(value, str):
        return 64 + len(value)
    if isinstance(value, dict):
        return 64 + sum(weigh(key) + weigh(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 64 + sum(map(weigh, value))
    if dataclasses.is_dataclass(value):
        return 64 + sum(map(weigh, vars(value).values()))
    return 32
