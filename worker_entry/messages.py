"""What an agent says to its controller, and the messages of both; `protocol` turns them into bytes and back.

Each is a frozen dataclass; its class name is its frame's `type`. Times are Unix seconds by the clock of who saw it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

from worker_entry.orders import (
    Attach,
    Beat,
    Clean,
    Dial,
    Goodbye,
    Hello,
    Inspect,
    Offer,
    Piece,
    Preload,
    Prepare,
    ShowStacks,
    Start,
    Stop,
)
from worker_entry.values import (
    Activity,
    CrashRecord,
    DialResult,
    GpuUse,
    Problem,
    TaskExit,
    TaskStatus,
)


@dataclass(frozen=True)
class Ready:
    """The answer to Hello: facts of the node, measured there. `cores`: those this process may use."""

    version: int
    pid: int
    hostname: str
    python: str
    executable: str
    time: float
    cores: int
    gpus: list[str]
    tensorflow: Optional[str]
    meeting: Optional[str] = None
    """Where a controller whose connection broke finds the agent again; None if it cannot."""


@dataclass(frozen=True)
class Attached:
    """The answer to Attach; `received`: how many of the controller's counted frames the agent has."""

    received: int


@dataclass(frozen=True)
class Fetch:
    """Send this part of a file that was offered; `index` is its place in the Offer."""

    index: int
    offset: int
    size: int


@dataclass(frozen=True)
class Synced:
    """The version is there, every file as it was offered; tasks will run in `directory`."""

    directory: str
    files: int
    fetched: int


@dataclass(frozen=True)
class Prepared:
    """Everything is there; `ports` are held until the tasks have bound them."""

    attempt: int
    ports: dict[str, int]


@dataclass(frozen=True)
class Inspected:
    """Facts of the node.

    `program_hash`: SHA-256 of the program's own code, empty where there is none to compare. `free_bytes`: on the
    disk of the run's files. `proxies`: variables by which gRPC would go through a proxy. `problem`: why the mark
    could not be left.
    """

    keras: Optional[str]
    gpus: list[GpuUse]
    free_bytes: int
    directory: str
    program_hash: str
    proxies: list[str]
    problem: str = ""


@dataclass(frozen=True)
class Dialled:
    """The answer to Dial; `marks`: those that are there."""

    results: list[DialResult]
    marks: list[str]


@dataclass(frozen=True)
class Refused:
    """Nothing was started, for all of these reasons."""

    problems: list[Problem]


@dataclass(frozen=True)
class Started:
    task: str
    pid: int
    time: float


@dataclass(frozen=True)
class Noted:
    """Something that the user may want to know, in one line."""

    text: str


@dataclass(frozen=True)
class Listening:
    """The task has opened its port: TensorFlow's server is up."""

    task: str
    time: float


@dataclass(frozen=True)
class Told:
    """How far the task's program has come."""

    task: str
    status: TaskStatus


CHILD = "\n--- a child process ---\n"
"""In Stacks, before what each process has written that the task has forked."""


@dataclass(frozen=True)
class Stacks:
    """The answer to ShowStacks for one task: what faulthandler has written, empty if it has not, and what it does."""

    task: str
    text: str
    activity: Activity


@dataclass(frozen=True)
class Halted:
    """A signal has stopped the task, as SIGSTOP does; 0: it goes on."""

    task: str
    signal: int
    time: float


@dataclass(frozen=True)
class Log:
    """`length` bytes of the task's log file, from `offset`, follow the header."""

    attempt: int
    task: str
    offset: int
    length: int


@dataclass(frozen=True)
class Exited:
    """The task's own process has ended; processes it started may still be there."""

    task: str
    exit: TaskExit
    time: float
    crash: Optional[CrashRecord] = None
    finished: Optional[float] = None
    """When the program came to its end, as far as that is known, whatever the interpreter did afterwards."""
    evidence: Optional[Problem] = None
    """What the node has to say about a failure: that its disk is full, that the kernel was out of memory."""


@dataclass(frozen=True)
class Empty:
    """No process of the attempt is left on the node, and all of the logs is sent.

    `left_behind` counts those that outlived their task and had to be ended, `killed` those that did not heed TERM.
    """

    attempt: int
    left_behind: int
    killed: int


@dataclass(frozen=True)
class Cleaned:
    """The answer to Clean: how many processes were ended, agents included, and which pids could not be."""

    ended: int
    left: list[int]


@dataclass(frozen=True)
class Broken:
    """The agent cannot go on (a full disk, say) and stops everything."""

    problem: Problem


ToAgent = Union[
    Hello, Attach, Offer, Piece, Preload, Prepare, Inspect, Dial, Start, ShowStacks, Stop, Beat, Goodbye, Clean
]
ToController = Union[
    Ready,
    Attached,
    Fetch,
    Synced,
    Prepared,
    Refused,
    Inspected,
    Dialled,
    Started,
    Noted,
    Listening,
    Halted,
    Told,
    Stacks,
    Log,
    Exited,
    Empty,
    Cleaned,
    Broken,
    Beat,
]
Message = Union[ToAgent, ToController]
