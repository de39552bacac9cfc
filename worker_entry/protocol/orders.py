"""What a controller says to an agent, and the beat that both send; `messages` has the answers.

Each is a frozen dataclass; its class name is its frame's `type`. Times are Unix seconds by the clock of who saw it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Optional

from worker_entry.protocol.field_limits import BODY_LIMIT, Attempt, Count, Items, Name, Path, Port, TaskName, Within
from worker_entry.protocol.values import FileEntry, Program, Target, TaskRequest, TaskStart

VERSION = 6

AGENT_GONE = "agent-gone"
"""The reference of the Problem that answers Attach when there is no agent any more."""


@dataclass(frozen=True)
class Hello:
    """The first frame. `directory` is where the agent keeps the run's files; made if missing, private to the user.

    `lease_s`: how long the agent goes on without a word from its controller. `stream_logs`: whether log bytes are
    sent; a controller on the same machine reads the files themselves.
    """

    version: Count
    run_id: Annotated[str, Path()]
    directory: Annotated[str, Path()]
    cwd: Annotated[str, Path()]
    lease_s: float
    stream_logs: bool


@dataclass(frozen=True)
class Offer:
    """The files that the program's folder shall have on the node; `to` is a link there to the version in use.

    `digest` names the version: it stands for names, content and modes of all files.
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
class Prepare:
    """Check every program and hold a port for every task, or say everything that stands in the way.

    With a `nonce`, every port answers who dials it with that, until the tasks are started.
    """

    attempt: Attempt
    tasks: Annotated[list[TaskRequest], Items(10_000)]
    first_port: Port
    last_port: Port
    nonce: Name = ""


@dataclass(frozen=True)
class Inspect:
    """Tell what there is on the node; where a `mark` is given, leave an empty file of that name in `shared`."""

    program: Program
    shared: Annotated[str, Path()] = ""
    mark: Annotated[str, Path(128)] = ""


@dataclass(frozen=True)
class Dial:
    """Dial every target; one that is ours answers with the `nonce`. Look for the `marks` of all nodes in `shared`."""

    targets: list[Target]
    nonce: Name
    shared: Annotated[str, Path()] = ""
    marks: list[Annotated[str, Path(128)]] = field(default_factory=list)


@dataclass(frozen=True)
class Preload:
    """Import TensorFlow now, so that tasks can be forked from there; and these `modules` before the first one is.

    `env` is laid over the agent's own environment, from which `unset` was removed: what all tasks will have in common.
    A `program` that does not import TensorFlow, as far as can be seen, needs none of it. `keep`: whether another
    attempt may follow, or a task come back alone.
    """

    program: Program
    env: dict[str, str]
    unset: list[str]
    modules: list[str]
    keep: bool


@dataclass(frozen=True)
class Start:
    """Start these tasks, all of them prepared before; `cluster` is that of TF_CONFIG, addresses by type of task."""

    attempt: Attempt
    tasks: Annotated[list[TaskStart], Items(10_000)]
    cluster: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class ShowStacks:
    """Have all tasks say what they are doing."""


@dataclass(frozen=True)
class Stop:
    """TERM now, KILL after `grace_s`, until no process of the attempt is left. A later Stop may shorten the grace."""

    grace_s: float


@dataclass(frozen=True)
class Beat:
    """I am alive, and have `received` counted frames. A controller sends it, an agent answers each at once.

    `time` is the sender's clock in Unix seconds, `echo` in an answer the `time` of what it answers: together they
    tell how far the two clocks are apart. `stamp`: in an answer that of the agent's `lease`, in a controller's beat the
    one of the last answer that it has got.
    """

    time: float
    received: Count
    echo: Optional[float] = None
    stamp: Optional[float] = None


@dataclass(frozen=True)
class Attach:
    """The first frame over a new connection to an agent whose old one broke.

    `meeting` is the place that its Ready named, `received` how many counted frames the controller has, and
    `offsets` how many bytes of each log of `attempt`.
    """

    version: Count
    reattach_folder: Annotated[str, Path()]
    received: Count
    attempt: Count
    offsets: Annotated[dict[TaskName, Count], Items(10_000)]


@dataclass(frozen=True)
class Goodbye:
    """Stop everything that is left and exit."""


@dataclass(frozen=True)
class Clean:
    """End what is left on the node of these runs, none of which has a controller any more.

    With `meeting`, only the agent that has it, and what is below it: another of the same run may be on the machine.
    """

    version: Count
    run_ids: list[Annotated[str, Path()]]
    reattach_folder: Optional[Annotated[str, Path()]] = None
