"""One node's messages to the controller: each is checked here, and waits here while too many are unread.

A node may report only its own tasks, and only attempts that have begun. The types of a message's fields mark what has
to be checked (`field_limits.OfSender`, `field_limits.OfAttempt`), so that no message escapes the check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from launcher.clock import SystemTiming, Timing
from launcher.tasks import TaskId
from launcher.transports.allowances import Allowances
from launcher.transports.base import LinkNews
from launcher.transports.log_mirror import LogMirror
from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.field_limits import OfAttempt, OfSender
from worker_entry.protocol.framing import ProtocolError, marked
from worker_entry.protocol.frozen import dataclass, field, is_frozen
from worker_entry.protocol.messages import Log, Message, Noted

UNREAD_MESSAGES = 1000
UNREAD_BYTES = 4 << 20
"""Limits per node; above either, its link is not read further. The node keeps the rest on its disk."""


@dataclass(frozen=True)
class Placement:
    """The current attempt, and the names of the tasks on each node."""

    attempt: int = 0
    tasks: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, attempt: int, nodes: Mapping[str, Collection[TaskId]]) -> Placement:
        return cls(attempt, {node: frozenset(map(str, tasks)) for node, tasks in nodes.items()})

    def check(self, node: str, message: Message) -> None:
        """Raises ProtocolError if this node may not send the message."""
        kind = type(message)
        for number in marked(kind, message, OfAttempt):
            if number > self.attempt:
                raise ProtocolError(f"{kind.__name__} for attempt {number}, which has not begun")
        for task in marked(kind, message, OfSender):
            if task not in self.tasks.get(node, ()):
                raise ProtocolError(f"{kind.__name__} for {task}, which is not one of its tasks")


@dataclass(frozen=True)
class Received:
    """A message from a node, and the placement that it was checked against.

    It is released to its inbox once it is read, and settled there once it is handled. `frame`: see `Deliver`.
    """

    inbox: Inbox
    message: Message | LinkNews
    placement: Placement
    weight: int
    frame: int = 0

    @property
    def is_late(self) -> bool:
        """Whether the message is about tasks of an attempt that has ended."""
        is_old = self.placement is not self.inbox.placement()
        return is_old and any(True for _ in marked(type(self.message), self.message, OfSender))


class Inbox:
    """Takes what a link reads: messages in `deliver`, log pieces in `write`, both on the link's thread.

    Args:
        node: the sender.
        placement: returns the current one.
        mirror: takes log pieces.
        put: takes checked messages; `release` is called once one has been read.
        timing: the links' clock and threads.
        store: takes parts of files.
    """

    def __init__(
        self,
        node: str,
        placement: Callable[[], Placement],
        mirror: LogMirror,
        put: Callable[[Received], None],
        timing: Timing | None = None,
        *,
        store: Callable[[str, FileRead, bytes], None] = lambda _node, _part, _data: None,
    ) -> None:
        self.node = node
        self._store = store
        self.placement = placement
        self._mirror = mirror
        self._put = put
        timing = timing or SystemTiming()
        self._changed = timing.make_condition()
        self._unread = [0, 0]
        """Messages, and their bytes."""
        self._now = timing.monotonic
        self._placement: Placement | None = None
        self._allowances = Allowances(0, timing.monotonic())
        """What the node may send in the attempt of `_placement`."""
        self._closed = False
        self.confirm: Callable[[int], None] = lambda _: None
        """The link's `confirm`."""
        self._last = self._settled = self._dropped = 0
        """The numbers of the last frame that was put, settled, and dropped here."""

    def deliver(self, node: str, message: Message | LinkNews, frame: int = 0, /) -> None:
        """Checks a message and passes it on; waits while too many messages are unread.

        Raises:
            ProtocolError: this node may not send the message.
        """
        assert node == self.node
        placement = self.placement()
        weight = 0
        if not isinstance(message, LinkNews):
            placement.check(node, message)
            if not self._may_send(message, placement):
                self._drop(frame)
                if self._allowances.refused > 1:
                    return
                message, frame = Noted("it sends too much; the rest is left out"), 0
            weight = weigh(message)
            with self._changed:
                if not self._has_room(weight):  # wait for half, or both threads would alternate message by message
                    self._changed.wait_for(lambda: self._has_room(weight, 2))
                is_closed = self._closed
                if not is_closed:
                    self._unread = [self._unread[0] + 1, self._unread[1] + weight]
                    self._last = max(self._last, frame)
            if is_closed:
                self._drop(frame)
                return
        self._put(Received(self, message, placement, weight, frame))

    def _may_send(self, message: Message, placement: Placement) -> bool:
        now = self._now()
        if placement is not self._placement:
            self._placement = placement
            self._allowances = Allowances(len(placement.tasks.get(self.node, ())), now)
        return self._allowances.take(message, now)

    def write(self, frame: Log, data: bytes, clock_offset_s: float = 0.0) -> bool:
        """Writes a log piece; one of an earlier attempt is dropped.

        Raises:
            ProtocolError: this node may not send the piece.
            OSError: the piece cannot be written.
        """
        placement = self.placement()
        if frame.attempt < placement.attempt:
            return False
        placement.check(self.node, frame)
        return self._mirror.write(frame, data, clock_offset_s)

    def store(self, part: FileRead, data: bytes) -> None:
        """Writes a part of a file, which then has to be delivered as well."""
        self._store(self.node, part, data)

    def release(self, arrived: Received) -> None:
        if not isinstance(arrived.message, LinkNews):
            with self._changed:
                self._unread = [self._unread[0] - 1, self._unread[1] - arrived.weight]
                if self._has_room(0, 2):
                    self._changed.notify_all()

    def settle(self, arrived: Received) -> None:
        """Confirms a message that was handled, and all before it."""
        with self._changed:
            self._settled = max(self._settled, arrived.frame)
        self._confirm()

    def _drop(self, frame: int) -> None:
        """Confirms a message that nobody will handle, once all before it are settled."""
        with self._changed:
            self._dropped = max(self._dropped, frame)
        self._confirm()

    def _confirm(self) -> None:
        with self._changed:
            is_idle = self._closed or self._settled == self._last
            count = max(self._settled, self._dropped) if is_idle else self._settled
        self.confirm(count)

    def close(self) -> None:
        """Drops everything that waits or arrives later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, weight: int, part: int = 1) -> bool:
        """Whether a message of this weight stays within the limits, divided by `part`."""
        messages, bytes_ = self._unread
        room = messages < UNREAD_MESSAGES // part and bytes_ + weight <= UNREAD_BYTES // part
        return self._closed or not messages or room


def weigh(value: Any) -> int:
    """Roughly the bytes that a message takes in memory."""
    if isinstance(value, str):
        return 64 + len(value)
    if isinstance(value, dict):
        return 64 + sum(weigh(key) + weigh(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 64 + sum(map(weigh, value))
    if is_frozen(value):
        return 64 + sum(map(weigh, vars(value).values()))
    return 32
