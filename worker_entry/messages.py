"""The messages between controller and agent; `protocol` turns them into bytes and back.

Each is a frozen dataclass; its class name is its frame's `type`. Times are Unix seconds by the clock of who saw it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional, Union

from worker_entry.values import (
    CrashRecord,
    DialResult,
    FileEntry,
    GpuUse,
    Problem,
    Program,
    Target,
    TaskExit,
    TaskRequest,
    TaskStart,
    TaskStatus,
)

VERSION = 2

AGENT_GONE = "agent-gone"
"""The reference of the Problem that answers Attach when there is no agent any more."""

# --- controller → agent -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first frame. `directory` is where the agent keeps the run's files; made if missing, private to the user.

    `lease_s`: how long the agent goes on without a word from its controller. `stream_logs`: whether log bytes are
    sent; a controller on the same machine reads the files themselves.
    """

    version: int
    run_id: str
    directory: str
    cwd: str
    lease_s: float
    stream_logs: bool


@dataclass(frozen=True)
class Offer:
    """The files that the program's folder shall have on the node; `to` is a link there to the version in use.

    `digest` names the version: it stands for names, content and modes of all files.
    """

    to: str
    digest: str
    files: list[FileEntry]


@dataclass(frozen=True)
class Piece:
    """The answer to Fetch: `length` bytes of the file, from `offset`, follow the header."""

    index: int
    offset: int
    length: int


@dataclass(frozen=True)
class Prepare:
    """Check every program and hold a port for every task, or say everything that stands in the way.

    With a `nonce`, every port answers who dials it with that, until the tasks are started.
    """

    attempt: int
    tasks: list[TaskRequest]
    first_port: int
    last_port: int
    nonce: str = ""


@dataclass(frozen=True)
class Inspect:
    """Tell what there is on the node; where a `mark` is given, leave an empty file of that name in `shared`."""

    program: Program
    shared: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Dial:
    """Dial every target; one that is ours answers with the `nonce`. Look for the `marks` of all nodes in `shared`."""

    targets: list[Target]
    nonce: str
    shared: str = ""
    marks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """Start these tasks, all of them prepared before."""

    attempt: int
    tasks: list[TaskStart]


@dataclass(frozen=True)
class Stop:
    """TERM now, KILL after `grace_s`, until no process of the attempt is left. A later Stop may shorten the grace."""

    grace_s: float


@dataclass(frozen=True)
class Beat:
    """I am alive, and have `received` counted frames. A controller sends it, an agent answers each at once.

    `time` is the sender's clock in Unix seconds, `echo` in an answer the `time` of what it answers: together they
    tell how far the two clocks are apart.
    """

    time: float
    received: int
    echo: Optional[float] = None


@dataclass(frozen=True)
class Attach:
    """The first frame over a new connection to an agent whose old one broke.

    `meeting` is the place that its Ready named, `received` how many counted frames the controller has, and
    `offsets` how many bytes of each log of `attempt`.
    """

    version: int
    meeting: str
    received: int
    attempt: int
    offsets: dict[str, int]


@dataclass(frozen=True)
class Goodbye:
    """Stop everything that is left and exit."""


@dataclass(frozen=True)
class Clean:
    """End what is left on the node of these runs, none of which has a controller any more."""

    version: int
    run_ids: list[str]


# --- agent → controller -------------------------------------------------------------------------------------


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
class Listening:
    """The task has opened its port: TensorFlow's server is up."""

    task: str
    time: float


@dataclass(frozen=True)
class Told:
    """How far the task's program has come."""

    task: str
    status: TaskStatus


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
    finished: bool = False
    """Whether the program had come to its end, whatever the interpreter did afterwards."""
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


ToAgent = Union[Hello, Attach, Offer, Piece, Prepare, Inspect, Dial, Start, Stop, Beat, Goodbye, Clean]
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
    Listening,
    Halted,
    Told,
    Log,
    Exited,
    Empty,
    Cleaned,
    Broken,
    Beat,
]
Message = Union[ToAgent, ToController]
