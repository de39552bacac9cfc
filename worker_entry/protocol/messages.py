"""What an agent says to its controller, and the messages of both; `protocol` turns them into bytes and back.

Each is a frozen dataclass; its class name is its frame's `type`. Times are Unix seconds by the clock of who saw it.
Every field of a message to the controller has its limits in its annotation (`limits`), and every type a size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Optional, Union

from worker_entry.protocol.field_limits import (
    BODY_LIMIT,
    Attempt,
    Count,
    ExactlyOne,
    Items,
    Line,
    Name,
    OwnTask,
    Path,
    Pid,
    Port,
    Text,
    Within,
)
from worker_entry.protocol.orders import (
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
from worker_entry.protocol.values import (
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

    version: Count
    pid: Pid
    hostname: Name
    python: Name
    executable: Line
    time: float
    cores: Annotated[int, Within(1, 1 << 20)]
    gpus: Annotated[list[Name], Items(1024)]
    tensorflow: Optional[Name]
    reattach_folder: Optional[Annotated[str, Path()]] = None
    """Where a controller whose connection broke finds the agent again; None if it cannot."""


@dataclass(frozen=True)
class Attached:
    """The answer to Attach; `received`: how many of the controller's counted frames the agent has."""

    received: Count


@dataclass(frozen=True)
class Fetch:
    """Send this part of a file that was offered; `index` is its place in the Offer."""

    index: Count
    offset: Count
    size: Annotated[int, Within(0, 1 << 20)]


@dataclass(frozen=True)
class Synced:
    """The version is there, every file as it was offered; tasks will run in `directory`."""

    directory: Line
    files: Count
    fetched: Count


@dataclass(frozen=True)
class Prepared:
    """Everything is there; `ports` are held until the tasks have bound them."""

    attempt: Attempt
    ports: Annotated[dict[OwnTask, Port], Items(10_000)]


@dataclass(frozen=True)
class Inspected:
    """Facts of the node.

    `program_hash`: SHA-256 of the program's own code, empty where there is none to compare. `free_bytes`: on the
    disk of the run's files. `proxies`: variables by which gRPC would go through a proxy. `problem`: why the mark
    could not be left.
    """

    keras: Optional[Name]
    gpus: Annotated[list[GpuUse], Items(1024)]
    free_bytes: Annotated[int, Within(0, 1 << 63)]
    directory: Line
    program_hash: Name
    proxies: Annotated[list[Name], Items(16)]
    problem: Line = ""


@dataclass(frozen=True)
class Dialled:
    """The answer to Dial; `marks`: those that are there."""

    results: Annotated[list[DialResult], Items(20_000)]
    marks: Annotated[list[Name], Items(20_000)]


@dataclass(frozen=True)
class Refused:
    """Nothing was started, for all of these reasons."""

    problems: Annotated[list[Problem], Items(1000)]


@dataclass(frozen=True)
class Started:
    task: OwnTask
    pid: Pid
    time: float


@dataclass(frozen=True)
class Noted:
    """Something that the user may want to know, in one line."""

    text: Annotated[str, Text(8192, lines=False)]


@dataclass(frozen=True)
class Listening:
    """The task has opened its port: TensorFlow's server is up."""

    task: OwnTask
    time: float


@dataclass(frozen=True)
class Status:
    """How far the task's program has come."""

    task: OwnTask
    status: TaskStatus


CHILD = "\n--- a child process ---\n"
"""In Stacks, before what each process has written that the task has forked."""


@dataclass(frozen=True)
class Stacks:
    """The answer to ShowStacks for one task: what faulthandler has written, empty if it has not, and what it does."""

    task: OwnTask
    text: Annotated[str, Text(1 << 20)]
    activity: Activity


@dataclass(frozen=True)
class Halted:
    """A signal has stopped the task, as SIGSTOP does; 0: it goes on."""

    task: OwnTask
    signal: Annotated[int, Within(0, 127)]
    time: float


@dataclass(frozen=True)
class Log:
    """`length` bytes of the task's log file, from `offset`, follow the header."""

    attempt: Attempt
    task: OwnTask
    offset: Count
    length: Annotated[int, Within(0, BODY_LIMIT)]


@dataclass(frozen=True)
class Exited:
    """The task's own process has ended; processes it started may still be there."""

    task: OwnTask
    exit: Annotated[TaskExit, ExactlyOne(("code", "signal"))]
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

    attempt: Attempt
    left_behind: Count
    killed: Count


@dataclass(frozen=True)
class Cleaned:
    """The answer to Clean: how many processes were ended, agents included, and which pids could not be."""

    ended: Count
    left: Annotated[list[Pid], Items(100_000)]


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
    Status,
    Stacks,
    Log,
    Exited,
    Empty,
    Cleaned,
    Broken,
    Beat,
]
Message = Union[ToAgent, ToController]

FRAME_LIMIT = 64 << 10
"""Bytes of a frame's header at the most, but for those below."""
FRAME_LIMITS: dict[type[Any], int] = {
    # The environment of every task of a node, every file of a folder, every address of a cluster.
    **dict.fromkeys((Offer, Preload, Prepare, Inspect, Dial, Start), 16 << 20),
    **dict.fromkeys((Attach, Clean), 1 << 20),
    # A line for every task of a node, or for every address of the cluster.
    **dict.fromkeys((Prepared, Refused, Cleaned), 1 << 20),
    Dialled: 8 << 20,
    # What a user's program makes long: its status file, its exception, its stacks.
    Status: 256 << 10,
    Exited: 1 << 20,
    Stacks: 2 << 20,
}
