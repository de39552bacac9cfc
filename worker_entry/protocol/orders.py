"""Orders from a controller to an agent, and the beat that both send; `messages` has the answers.

Each is a frozen dataclass; its class name is its frame's `type`. Times are Unix seconds by the observer's clock.
"""

from __future__ import annotations

from typing import Annotated, Optional, Union

from worker_entry.protocol.field_limits import (
    BODY_LIMIT,
    Amount,
    Attempt,
    Count,
    Items,
    Matches,
    Name,
    NetworkName,
    Path,
    Port,
    TaskName,
    Text,
    Within,
)
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.protocol.profiles import Profile
from worker_entry.protocol.scalars import ScalarPoint
from worker_entry.protocol.speed import MeasureLink, MeasureNode
from worker_entry.protocol.values import FileEntry, Program, Target, TaskRequest, TaskStart

VERSION = 13

AGENT_GONE = "agent-gone"
"""The reference of the Problem that answers Attach when the agent has ended."""
TAKEN_OVER = "taken-over"
"""The reference of the Problem that answers a controller after another one has taken over its agent."""


@dataclass(frozen=True)
class Hello:
    """The first frame. `directory` is the folder for the run's files; made if missing, private to the user.

    `lease_s`: how long the agent goes on without hearing from its controller. `stream_logs`: whether the agent sends
    log bytes; a controller on the same machine reads the files itself. `sample_s`: how often the agent measures what
    tasks use; 0: never. `isolated`: whether the agent and its tasks live in a network of their own.
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
    """The files that the program's folder has to contain on the node; `to` is a link there to the current version.

    `digest` identifies the version: it is computed from names, content and modes of all files.
    """

    to: Annotated[str, Path()]
    digest: Annotated[str, Path(128)]
    files: list[FileEntry]


@dataclass(frozen=True)
class Piece:
    """The answer to Fetch: `length` bytes of the file, from `offset`, follow the header."""

    index: Count
    offset: Count
    length: Annotated[int, Within(0, BODY_LIMIT)]


@dataclass(frozen=True)
class TunnelKey:
    """A certificate and its private key, in PEM: each side of a connection between nodes shows that it has both."""

    certificate: Annotated[str, Text(8192)]
    key: Annotated[str, Text(8192)] = field(repr=False)


@dataclass(frozen=True)
class Prepare:
    """Check every program and hold a port for every task, or report all problems.

    With a `nonce`, every port answers connections until the tasks are started. `allowed`: the networks that may reach
    the ports, besides this node and the nodes that call it. `guard`: whether to keep others from the ports: `auto`
    where that is possible, `required`, or `off`. `tunnel`: what encrypts the connections between the nodes; the ports
    are then held in the network that the agent has left.
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
    """Report facts about the node; if a `mark` is given, write an empty file of that name to `shared`."""

    program: Program
    shared: Annotated[str, Path()] = ""
    mark: Annotated[str, Path(128)] = ""


@dataclass(frozen=True)
class Dial:
    """Dial every target; our agents answer with the `nonce`. Look for the `marks` of all nodes in `shared`."""

    targets: list[Target]
    nonce: Name
    shared: Annotated[str, Path()] = ""
    marks: list[Annotated[str, Path(128)]] = field(default_factory=list)


@dataclass(frozen=True)
class Preload:
    """Import TensorFlow now in a process from which tasks can be forked, and these `modules` before the first fork.

    `env` is merged over the agent's own environment without `unset`: what all tasks will have in common. Nothing is
    imported for a `program` that does not seem to import TensorFlow. `keep`: whether another attempt may follow, or a
    task may be restarted individually.
    """

    program: Program
    env: dict[str, str]
    unset: list[str]
    modules: list[str]
    keep: bool


@dataclass(frozen=True)
class Start:
    """Start these tasks, which were all prepared; `cluster` is TF_CONFIG's, addresses by task type.

    `routes`: with a tunnel, the host that each other node's address in the cluster stands for. `callers`: addresses
    from which the nodes of the cluster also call.
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
class Scalars:
    """Append these points to the event files of TensorBoard in folders below `directory`."""

    directory: Annotated[str, Path()]
    points: Annotated[list[ScalarPoint], Items(1000)]


@dataclass(frozen=True)
class Stop:
    """TERM now, KILL after `grace_s`, until no process of the attempt is left. A later Stop may shorten the grace.

    `for_handlers`: the grace is for handlers of SIGTERM alone: a process without one gets KILL at once.
    """

    grace_s: float
    for_handlers: bool = False


@dataclass(frozen=True)
class Beat:
    """The sender is alive, and `received` counted frames need not be kept for it. An agent answers each of a
    controller's beats at once.

    An agent needs no frame again that it has received, a controller none that it has handled: after its end, another
    controller may take over the agent.

    `time` is the sender's clock in Unix seconds; `echo` in an answer is the `time` of the beat that it answers:
    together they show how far the two clocks are apart. `stamp`: in an answer, the stamp of the agent's lease; in a
    controller's beat, the stamp of the last answer that it has received.
    """

    time: float
    received: Count
    echo: Optional[float] = None
    stamp: Optional[float] = None


@dataclass(frozen=True)
class Attach:
    """The first frame over a new connection to an agent whose old connection broke, or whose controller is gone.

    `reattach_folder` is from the agent's Ready, `received` says how many counted frames the controller has, and
    `offsets` how many bytes of each log of `attempt`. `generation`: the controller's, 0 for one that has started the
    agent itself.

    With `takeover`, the sender follows another controller, has a higher generation, and is from now on the only one
    that the agent obeys; `received` then counts the frames that are known to have been handled. The agent must belong
    to the run `run_id`, if one is given.
    """

    version: Count
    reattach_folder: Annotated[str, Path()]
    received: Count
    attempt: Count
    offsets: Annotated[dict[TaskName, Count], Items(10_000)]
    generation: Count = 0
    takeover: bool = False
    run_id: Annotated[str, Path()] = ""


@dataclass(frozen=True)
class Goodbye:
    """Stop everything that is left and exit.

    `keep_warm_s`: what the next run could use may stay for so long.
    """

    keep_warm_s: Amount = 0.0


@dataclass(frozen=True)
class Clean:
    """Stop leftover processes of these runs on the node; their controllers are gone.

    With `reattach_folder`, stop only that folder's agent and what is below it: the same run may have another agent on
    the machine. With `generation`, refuse that if a controller of a higher one has taken over the agent. With `warm`,
    stop only agents that wait for another run.
    """

    version: Count
    run_ids: list[Annotated[str, Path()]]
    reattach_folder: Optional[Annotated[str, Path()]] = None
    generation: Optional[Count] = None
    warm: bool = False


ToAgent = Union[
    Hello,
    Attach,
    Offer,
    Piece,
    Preload,
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
