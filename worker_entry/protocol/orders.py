"""Orders from a controller to an agent, and the heartbeat that both send; `messages` has the answers.

Each order is a frozen dataclass; its class name is the frame's `type`. Times are Unix seconds by the observer's clock.
"""

from __future__ import annotations

from typing import Annotated, Optional, Union

from worker_entry.protocol.collection import FindFiles, ReadFile
from worker_entry.protocol.field_limits import (
    BODY_LIMIT,
    Amount,
    Attempt,
    Count,
    Items,
    Matches,
    Name,
    NetworkName,
    Number,
    Path,
    Port,
    TaskName,
    Text,
    Within,
)
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.gpus import ClaimGpus, ReleaseGpus
from worker_entry.protocol.profiles import Profile
from worker_entry.protocol.speed import MeasureLink, MeasureNode
from worker_entry.protocol.values import FileEntry, Program, Target, TaskRequest, TaskStart

VERSION = 26
AGENT_GONE = "agent-gone"
"""The reference of the Problem that answers Attach when the agent has certainly ended."""
UNPROVEN = "agent-unknown"
"""The reference of the Problem that answers Clean when no process is visible, but the agent may run elsewhere."""
TAKEN_OVER = "taken-over"
"""The reference of the Problem that answers a controller after another controller has taken over its agent."""


@dataclass(frozen=True)
class Hello:
    """The first frame. `directory` is the folder for the run's files; a missing folder is created, private to the user.

    `lease_s`: how long the agent continues without hearing from its controller. `stream_logs`: whether the agent sends
    log bytes; a controller on the same machine reads the files itself. `sample_s`: how often the agent measures the
    tasks' resource use; 0: never. `isolated`: whether the agent and its tasks live in a separate network namespace.
    """

    version: Count
    run_id: Annotated[str, Path()]
    directory: Annotated[str, Path()]
    cwd: Annotated[str, Path()]
    lease_s: float
    stream_logs: bool
    sample_s: Amount = 2.0
    isolated: bool = False


@dataclass(frozen=True)
class Offer:
    """The files that the program's folder must contain on the node; `to` is a link there to the current version.

    `digest` identifies the version: it is computed from the names, content and modes of all files.

    With `checkpoint`, `to` is the folder of checkpoints. Its files are replaced, unless the node has newer ones; other
    files there are left alone.
    """

    to: Annotated[str, Path()]
    digest: Annotated[str, Path(128)]
    files: list[FileEntry]
    checkpoint: bool = False


@dataclass(frozen=True)
class Piece:
    """The answer to Fetch: `length` bytes of the file, from `offset`, follow the header."""

    index: Count
    offset: Count
    length: Annotated[int, Within(0, BODY_LIMIT)]
    checkpoint: bool = False


@dataclass(frozen=True)
class Input:
    """The answer to AskInput: `length` bytes, from `offset`, follow the header; `last`: nothing comes after them."""

    task: TaskName
    offset: Count
    length: Annotated[int, Within(0, BODY_LIMIT)]
    last: bool


@dataclass(frozen=True)
class TunnelKey:
    """A certificate and its private key, in PEM: each side of a connection between nodes proves that it has them."""

    certificate: Annotated[str, Text(8192)]
    key: Annotated[str, Text(8192)] = field(repr=False)


@dataclass(frozen=True)
class Prepare:
    """Check every program and hold a port for every task, or report all problems.

    With a `nonce`, every port answers connections until the tasks are started. `allowed`: the networks that may reach
    the ports, besides this node and the cluster's nodes. `guard`: whether to keep others from the ports: `auto` (where
    possible), `required`, or `off`. `tunnel`: the key that encrypts the connections between the nodes; the ports are
    then held in the machine's network, which the agent has left.
    """

    attempt: Attempt
    tasks: Annotated[list[TaskRequest], Items(10_000)]
    first_port: Port
    last_port: Port
    nonce: Name = ""
    allowed: Annotated[list[NetworkName], Items(10_000)] = field(default_factory=list)
    guard: Annotated[str, Matches("auto|required|off", "way to guard ports")] = "auto"
    tunnel: Optional[TunnelKey] = None


@dataclass(frozen=True)
class Inspect:
    """Report facts about the node; if a `mark` is given, create an empty file for it in `shared`.

    `examines`: whether to report MachineFacts as well.
    """

    program: Program
    shared: Annotated[str, Path()] = ""
    mark: Annotated[str, Path(128)] = ""
    examines: bool = False


@dataclass(frozen=True)
class Dial:
    """Dial every target; our agents prove that they know the `nonce`. Look for the `marks` of all nodes in `shared`."""

    targets: list[Target]
    nonce: Name
    shared: Annotated[str, Path()] = ""
    marks: list[Annotated[str, Path(128)]] = field(default_factory=list)


@dataclass(frozen=True)
class Preload:
    """Import a framework now in a process from which tasks can be forked, and these `modules` before the first fork.

    The result of `env`, `unset` and `defaults`, as in TaskStart, is the environment that all tasks share. Nothing is
    imported for a `program` that does not seem to import the `framework`. `keep`: whether another attempt may follow,
    or a task may be restarted individually.
    """

    program: Program
    env: dict[str, str]
    unset: list[str]
    modules: list[str]
    keep: bool
    defaults: list[str] = field(default_factory=list)
    framework: Name = "tensorflow"


@dataclass(frozen=True)
class Early:
    """The only order that may come before Hello: begin with this `preload` in the current folder, for a run to come."""

    preload: Preload


@dataclass(frozen=True)
class Start:
    """Start these tasks, which were all prepared; `cluster` is the cluster of TF_CONFIG: addresses by task type.

    `routes`: with a tunnel, maps each other node's address in the cluster to the node's real host. `callers`: further
    addresses from which the cluster's nodes connect.
    """

    attempt: Attempt
    tasks: Annotated[list[TaskStart], Items(10_000)]
    cluster: dict[str, list[str]] = field(default_factory=dict)
    routes: Annotated[dict[Name, Name], Items(10_000)] = field(default_factory=dict)
    callers: Annotated[list[Name], Items(10_000)] = field(default_factory=list)


@dataclass(frozen=True)
class ShowStacks:
    """Collect the Python stacks of all tasks."""


@dataclass(frozen=True)
class ScalarPoint:
    """The values of one moment, by tag; `folder`: the folder of their event file, below the log directory.

    `time` is in Unix seconds, by the controller's clock.
    """

    folder: Annotated[str, Matches(r"[a-z]+(?:/[a-z]+-[0-9]+)?", "folder of event files")]
    step: Number
    time: float
    values: Annotated[dict[Name, float], Items(64)]


@dataclass(frozen=True)
class Scalars:
    """Append these points to TensorBoard's event files in folders below `directory`."""

    directory: Annotated[str, Path()]
    points: Annotated[list[ScalarPoint], Items(1000)]


@dataclass(frozen=True)
class Stop:
    """Send TERM now, and KILL after `grace_s`, until no process of the attempt is left.

    A later Stop may shorten the grace period. `for_handlers`: only processes that handle SIGTERM get it; all others get
    KILL at once. `interrupts`: send INT to the tasks' own processes in place of TERM, which a later Stop sends; then,
    programs that handle SIGTERM keep the first grace, unless the later Stop has none. `longer`: the graces of tasks
    that get a longer one, in seconds.
    """

    grace_s: float
    for_handlers: bool = False
    interrupts: bool = False
    longer: Annotated[dict[TaskName, float], Items(10_000)] = field(default_factory=dict)


@dataclass(frozen=True)
class Beat:
    """The heartbeat: the sender is alive, and its peer need not keep the first `received` counted frames any longer.

    An agent answers each heartbeat of a controller at once. An agent confirms the frames that it has received. A
    controller confirms only the frames that it has handled, because another controller may take over the agent.

    `time` is the sender's clock in Unix seconds; `echo` in an answer is the `time` of the answered heartbeat: together
    they show the difference between the two clocks. `stamp`: in an answer, the stamp of the agent's lease; in a
    controller's heartbeat, the stamp of the last answer that the controller has received.
    """

    time: float
    received: Count
    echo: Optional[float] = None
    stamp: Optional[float] = None


@dataclass(frozen=True)
class Attach:
    """The first frame over a new connection to an agent whose old connection broke, or whose controller is gone.

    `reattach_folder` is from the agent's Ready. `received`: how many counted frames the controller has received.
    `offsets`: how many bytes of each log of `attempt` the controller has. `generation`: the controller's generation; 0
    if this controller has started the agent itself.

    With `takeover`, the sender succeeds another controller, has a higher generation, and becomes the only controller
    that the agent obeys; `received` then counts the frames that are known to have been handled. If `run_id` is given,
    the agent must belong to that run. `process_view` is from the agent's Ready, too.
    """

    version: Count
    reattach_folder: Annotated[str, Path()]
    received: Count
    attempt: Count
    offsets: Annotated[dict[TaskName, Count], Items(10_000)]
    generation: Count = 0
    takeover: bool = False
    run_id: Annotated[str, Path()] = ""
    process_view: Annotated[str, Text(512)] = ""


@dataclass(frozen=True)
class Goodbye:
    """Stop all remaining processes and exit.

    `keep_warm_s`: how long the agent may stay for the next run, with the processes that the next run can use.
    """

    keep_warm_s: Amount = 0.0


@dataclass(frozen=True)
class Clean:
    """Stop leftover processes of these runs on the node; their controllers are gone.

    With `reattach_folder`, spare the processes below other agents: the same run may have another agent on the machine.
    `process_view` then is from the agent's Ready, too. With `generation`, refuse if a controller of a higher generation
    has taken over the agent. With `warm`, stop only agents that wait for another run.
    """

    version: Count
    run_ids: list[Annotated[str, Path()]]
    reattach_folder: Optional[Annotated[str, Path()]] = None
    generation: Optional[Count] = None
    warm: bool = False
    process_view: Annotated[str, Text(512)] = ""


ToAgent = Union[
    Hello,
    Attach,
    Offer,
    Piece,
    FindFiles,
    ReadFile,
    ClaimGpus,
    ReleaseGpus,
    Input,
    Preload,
    Early,
    Prepare,
    Inspect,
    Dial,
    MeasureNode,
    MeasureLink,
    Start,
    ShowStacks,
    Profile,
    Scalars,
    Stop,
    Beat,
    Goodbye,
    Clean,
]
