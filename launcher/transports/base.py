"""The interface of transports: they start an agent on a node and carry frames; they decide nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from worker_entry.protocol.collection import FileRead
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import KeptWarm, Log, Message, Ready


@dataclass(frozen=True)
class LinkClosed:
    """The agent is gone, or its state is unknown.

    `taken_over`: the agent continues, but obeys another controller of the run; this controller leaves it alone.
    """

    reason: str
    taken_over: bool = False


@dataclass(frozen=True)
class LinkDropped:
    """The connection to the agent broke; the link reconnects until the agent's lease expires."""

    reason: str


@dataclass(frozen=True)
class LinkResumed:
    """The link has reconnected, `after_s` seconds after the last data on the old connection; nothing was lost."""

    after_s: float


@dataclass(frozen=True)
class LinkTakenOver:
    """The link has taken over an earlier controller's agent; `received`: how many orders of that controller arrived.

    Only counted frames (`resend_buffer`) count, Hello included. All later reports of the agent are new to us.
    """

    received: int


@dataclass(frozen=True)
class LinkNote:
    """A message for the user."""

    text: str


LinkNews = LinkClosed | LinkDropped | LinkResumed | LinkTakenOver | LinkNote


@dataclass(frozen=True)
class AgentAddress:
    """The address at which a later connection finds an agent; both fields are from its Ready, or empty without one."""

    reattach_folder: str = ""
    process_view: str = ""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """The facts about an agent that an earlier controller of the run started.

    Attributes:
        reattach_folder: from the agent's Ready.
        run_id: the run that the agent must belong to.
        generation: this controller's; above that of every earlier controller.
        handled: the number of the agent's last frame that is known to have been handled.
        attempt: the current one; 0 before the first.
        offsets: how many bytes of each of its logs are in the run's files, by the task's name.
        ready: the agent's Ready, if it was handled.
        within_s: how long to try to reach the agent; None: for the whole lease.
    """

    reattach_folder: str
    run_id: str
    generation: int
    handled: int
    attempt: int
    offsets: Mapping[str, int]
    ready: Ready | None = None
    within_s: float | None = None


class LinkError(Exception):
    """The node is or has become unreachable; the text tells the user why."""


class GoneError(LinkError):
    """The machine itself is gone; `proven`: everything that ran there is certainly gone, too."""

    def __init__(self, message: str, *, proven: bool) -> None:
        super().__init__(message)
        self.proven = proven


class LinkBroken(Exception):  # noqa: N818 - the state of a connection, which another one may replace
    """This connection to the agent is broken; the agent may still be running."""


class Deliver(Protocol):
    """Takes a message from a node; called from the link's own thread."""

    def __call__(self, node: str, message: Message | LinkNews, frame: int = 0, /) -> None:
        """`frame`: the number of the agent's frame, for `Link.confirm`; 0 for a message that is not counted."""


class Link(Protocol):
    """The connection to a started agent."""

    @property
    def clock_offset_s(self) -> float:
        """How far the node's clock is ahead of ours; 0 while that is unknown."""

    @property
    def last_heard(self) -> float:
        """When the last data came from the agent, in monotonic seconds."""

    @property
    def kept(self) -> KeptWarm | None:
        """The warm state that stays for the next run; known after `close`, and only if Goodbye asked for it."""

    def send(self, message: Message, body: bytes = b"") -> None:
        """Sends a frame; never blocks and never fails: a broken link is reported as LinkClosed."""

    def confirm(self, frame: int) -> None:
        """Notes that the agent's frames up to this number were handled; the agent then drops them."""

    def drop_if_silent(self, limit_s: float) -> None:
        """Closes the link if no data came for `limit_s`, although the agent may still answer."""

    def abandon(self) -> None:
        """Closes the link without telling the agent, which continues if it can."""

    def close(self) -> int | None:
        """Stops the agent, by force if necessary; returns how many processes are left, None if that is unknown."""


class Transport(Protocol):
    """How a node is reached. `shares_files`: the agent writes logs where we read them, and sends none."""

    shares_files: bool

    def connect(
        self, node: str, deliver: Deliver, mirror: FileSink, lease_s: float, resumption: Resumption | None = None
    ) -> Link:
        """Starts the agent; `deliver` gets everything from then on, except for bytes of files, which go to `mirror`.

        A broken connection may be replaced until the agent has heard nothing for `lease_s`. With a resumption, a
        running agent is taken over, and none is started.

        Raises:
            OSError: the agent could not be started.
            LinkError: agents of this transport end with their controller.
        """


class FileSink(Protocol):
    """Takes the bytes of logs and other files of a node."""

    def write(self, frame: Log, data: bytes, clock_offset_s: float = 0.0) -> bool:
        """Called from the link's own thread; returns False for a piece of an earlier attempt, which is dropped.

        `clock_offset_s`: how far the times of the frame are ahead of ours.

        Raises:
            ProtocolError: the piece contradicts earlier ones.
            OSError: the piece cannot be written here.
        """

    def store(self, part: FileRead, data: bytes) -> None:
        """Writes a part of a file; called from the link's own thread before the part is delivered."""
