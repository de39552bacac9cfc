"""Messages from an agent to its controller; `framing` turns them into bytes and back.

Each message is a frozen dataclass; its class name is the frame's `type`. Times are Unix seconds by the observer's
clock. Every field of a message to the controller has limits in its annotation (`field_limits`), and every type has a
maximum size.
"""

from __future__ import annotations

from typing import Annotated, Optional, Union

from worker_entry.protocol.collection import FileRead, FilesFound
from worker_entry.protocol.field_limits import (
    BODY_LIMIT,
    LARGEST,
    Amount,
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
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.gpus import GpusClaimed
from worker_entry.protocol.log_index import MARKS, Mark
from worker_entry.protocol.orders import Beat, ToAgent
from worker_entry.protocol.profiles import Profiled
from worker_entry.protocol.samples import NodeSample, TaskSample
from worker_entry.protocol.speed import LinkMeasured, NodeMeasured
from worker_entry.protocol.values import (
    Activity,
    CrashRecord,
    DialResult,
    GpuUse,
    MachineFacts,
    Problem,
    TaskExit,
    TaskStatus,
)


@dataclass(frozen=True)
class Ready:
    """The answer to Hello: facts about the node. `cores`: the number of cores that the agent may use.

    `reattach_folder`: the folder through which a controller reconnects, if any. `process_view`: as in `machine`.
    """

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
    process_view: Annotated[str, Text(512)] = ""


@dataclass(frozen=True)
class Attached:
    """The answer to Attach; `received`: how many of the controller's counted frames the agent has received.

    After a takeover, `received` counts the earlier controller's frames, and the new controller continues that count.
    `first`: the number of the agent's next counted frame on this connection.
    """

    received: Count
    first: Annotated[int, Within(1, LARGEST)]


@dataclass(frozen=True)
class Fetch:
    """Asks for a part of an offered file; `index` is the file's position in the Offer.

    `left`: the bytes of all files that the node still has to request, including this part. `checkpoint`: as in Offer.
    """

    index: Count
    offset: Count
    size: Annotated[int, Within(0, 1 << 20)]
    left: Count
    checkpoint: bool = False


@dataclass(frozen=True)
class AskInput:
    """Requests the task's stdin from this offset on; answered when input is available."""

    task: OwnTask
    offset: Count


@dataclass(frozen=True)
class Synced:
    """Every file is as offered; tasks will run in `directory`, unless `checkpoint` is set, as in Offer.

    `files` of them had to be fetched, with `fetched` bytes. `newer`: the node has kept newer checkpoints.
    """

    directory: Line
    files: Count
    fetched: Count
    checkpoint: bool = False
    newer: bool = False


@dataclass(frozen=True)
class Prepared:
    """All tasks can be started; `ports` are held for them. `unguarded`: why others can reach some of these ports."""

    attempt: Attempt
    ports: Annotated[dict[OwnTask, Port], Items(10_000)]
    unguarded: Annotated[dict[OwnTask, Line], Items(10_000)] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspected:
    """The answer to Inspect.

    `program_hash`: SHA-256 of the program's own code; empty if no code can be compared. `free_bytes`: free space on
    the disk of the run's files. `proxies`: variables that make gRPC use a proxy. `problem`: why the mark could not be
    written. `addresses`: the addresses of the node's interfaces, without loopback. `machine`: identifies the running
    kernel, which nodes on the same machine share. `methods`: the methods that can compute a matrix product here.
    `facts`: if they were asked for.
    """

    keras: Optional[Name]
    gpus: Annotated[list[GpuUse], Items(1024)]
    free_bytes: Annotated[int, Within(0, 1 << 63)]
    directory: Line
    program_hash: Name
    proxies: Annotated[list[Name], Items(16)]
    problem: Line = ""
    addresses: Annotated[list[Name], Items(10_000)] = field(default_factory=list)
    machine: Name = ""
    methods: Annotated[list[Name], Items(16)] = field(default_factory=list)
    facts: Optional[MachineFacts] = None


@dataclass(frozen=True)
class Dialled:
    """The answer to Dial; `marks`: the requested marks that exist."""

    results: Annotated[list[DialResult], Items(20_000)]
    marks: Annotated[list[Name], Items(20_000)]


@dataclass(frozen=True)
class Refused:
    """The node cannot carry out an order; `problems` has all reasons."""

    problems: Annotated[list[Problem], Items(1000)]


@dataclass(frozen=True)
class Started:
    """The task's own process runs; `start`: how often the task has been started in this attempt."""

    task: OwnTask
    pid: Pid
    time: float
    start: Count = 1


@dataclass(frozen=True)
class Noted:
    """A one-line note for the user; a `detail` is shown only if the user asks for more."""

    text: Annotated[str, Text(8192, lines=False)]
    detail: bool = False


@dataclass(frozen=True)
class Signalled:
    """Slurm has signalled all processes on the node, agent and tasks, with SIGTERM; SIGKILL follows."""

    time: float


@dataclass(frozen=True)
class Listening:
    """The task has opened its port: TensorFlow's server is up."""

    task: OwnTask
    time: float


@dataclass(frozen=True)
class Status:
    """The progress of the task's program."""

    task: OwnTask
    status: TaskStatus


CHILD = "\n--- a child process ---\n"
"""Precedes, in Stacks, the output of each process that the task has forked."""


@dataclass(frozen=True)
class Stacks:
    """The answer to ShowStacks for one task: faulthandler's output, which may be empty, and the task's activity."""

    task: OwnTask
    text: Annotated[str, Text(256 << 10)]
    activity: Activity


@dataclass(frozen=True)
class Sampled:
    """The resource use of the running tasks and their node. A sample that is lost with a connection is not resent."""

    time: float
    tasks: Annotated[list[TaskSample], Items(10_000)]
    node: Optional[NodeSample] = None


@dataclass(frozen=True)
class Saved:
    """The newest entry of the tasks' checkpoint directory: its name, and when it was written."""

    name: Annotated[str, Text(256, lines=False)]
    time: float


@dataclass(frozen=True)
class Halted:
    """A signal such as SIGSTOP has suspended the task; 0: the task continues."""

    task: OwnTask
    signal: Annotated[int, Within(0, 127)]
    time: float


@dataclass(frozen=True)
class Log:
    """`length` bytes of the task's log, from `offset`, follow the header; `marks` date these bytes."""

    attempt: Attempt
    task: OwnTask
    offset: Count
    length: Annotated[int, Within(0, BODY_LIMIT)]
    marks: Annotated[list[Mark], Items(MARKS)] = field(default_factory=list)


@dataclass(frozen=True)
class InterruptTaken:
    """The task's program reacts to our SIGINT: it raises KeyboardInterrupt, or has its own handler."""

    task: OwnTask


@dataclass(frozen=True)
class Returned:
    """The task's program has ended, with this exception or successfully; its process may still run.

    `start`: as in Started.
    """

    task: OwnTask
    time: float
    crash: Optional[CrashRecord] = None
    start: Count = 1


@dataclass(frozen=True)
class Exited:
    """The task's own process has ended; processes that the task started may still run. `start`: as in Started."""

    task: OwnTask
    exit: Annotated[TaskExit, ExactlyOne(("code", "signal"))]
    time: float
    crash: Optional[CrashRecord] = None
    finished: Optional[float] = None
    """When the program ended without a failure, even if the interpreter failed afterwards; None if unknown."""
    evidence: Optional[Problem] = None
    """The node's evidence for the cause of a failure: a full disk, or the kernel's OOM killer."""
    start: Count = 1
    before_stop: bool = False
    """Whether the program or the process had ended before its agent began to stop it."""


@dataclass(frozen=True)
class Empty:
    """No process of the attempt is left on the node, and all of its logs are sent.

    `left_behind` processes outlived their task and had to be stopped; `killed` processes ignored TERM.
    """

    attempt: Attempt
    left_behind: Count
    killed: Count


@dataclass(frozen=True)
class Cleaned:
    """The answer to Clean: `ended` processes were stopped, agents included; the processes `left` still run."""

    ended: Count
    left: Annotated[list[Pid], Items(100_000)]


@dataclass(frozen=True)
class Broken:
    """The agent cannot continue, because of a full disk for example, and stops everything."""

    problem: Problem


@dataclass(frozen=True)
class KeptWarm:
    """The last message of an agent that was asked to stay for the next run.

    The processes `pids` stay for `seconds` and hold `bytes` of memory that is not shared; with a `problem`, none stays.
    """

    seconds: Amount
    pids: Annotated[list[Pid], Items(16)]
    bytes: Count
    problem: Line = ""


@dataclass(frozen=True)
class CacheUsed:
    """The numbers of compile cache entries that the tasks of a node have loaded and added in an attempt."""

    attempt: Attempt
    loaded: Count
    stored: Count


@dataclass(frozen=True)
class ConnectionsRejected:
    """The task's port has refused connections from an address outside the cluster; sent once for each address."""

    task: OwnTask
    address: Name
    count: Count


@dataclass(frozen=True)
class Unguarded:
    """Others can reach the task's port after all, for the reason `why`."""

    task: OwnTask
    why: Line


ToController = Union[
    Ready,
    Attached,
    Fetch,
    Synced,
    FilesFound,
    FileRead,
    GpusClaimed,
    Prepared,
    Refused,
    Inspected,
    Dialled,
    NodeMeasured,
    LinkMeasured,
    Started,
    Noted,
    Signalled,
    Listening,
    Halted,
    Status,
    Sampled,
    ConnectionsRejected,
    Unguarded,
    Saved,
    Stacks,
    Profiled,
    Log,
    AskInput,
    InterruptTaken,
    Returned,
    Exited,
    CacheUsed,
    Empty,
    Cleaned,
    KeptWarm,
    Broken,
    Beat,
]
Message = Union[ToAgent, ToController]
