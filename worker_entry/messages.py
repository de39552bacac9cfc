"""The messages between controller and agent; `protocol` turns them into bytes and back.

Each is a frozen dataclass whose class name is its frame's `type`. All times are Unix seconds by the clock of the
machine where the fact was seen.
"""

from __future__ import annotations

import os
import signal as signals
from dataclasses import dataclass, field
from typing import Optional, Union

VERSION = 2

AGENT_GONE = "agent-gone"
"""The reference of the Problem that answers Attach when there is no agent any more."""

# --- values inside messages ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What a task runs: a Python `script` or `module` with its arguments, or a `command` whose target is argv[0]."""

    kind: str
    target: str
    args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CrashRecord:
    """An unhandled exception, as the interpreter in which it was raised saw it; `time` in Unix seconds."""

    time: float
    exception: str
    message: str
    file: Optional[str] = None
    line: Optional[int] = None


@dataclass(frozen=True)
class TaskExit:
    """How a process ended: by an exit `code` or by a `signal`, never both and never folded into one number."""

    code: Optional[int] = None
    signal: Optional[int] = None
    core_dumped: bool = False

    @classmethod
    def from_wait_status(cls, status: int) -> TaskExit:
        """Decodes what `waitpid` returned."""
        if os.WIFSIGNALED(status):
            return cls(signal=os.WTERMSIG(status), core_dumped=os.WCOREDUMP(status))
        return cls(code=os.WEXITSTATUS(status))

    @property
    def ok(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit status {self.code}"
        core = ", core dumped" if self.core_dumped else ""
        try:
            name = signals.Signals(self.signal).name
        except ValueError:  # a real-time signal
            name = f"signal {self.signal}"
        return f"{name} (signal {self.signal}{core})" if name.startswith("SIG") else f"{name}{core}"


@dataclass(frozen=True)
class Problem:
    """Why a node cannot do what it was asked to; `reference` is the error's stable kebab-case name."""

    reference: str
    message: str
    cure: str = ""
    task: Optional[str] = None


@dataclass(frozen=True)
class TaskRequest:
    """What a task will need. `port`: a number to be honoured, or 0 for a free one of the range."""

    task: str
    program: Program
    port: int = 0


@dataclass(frozen=True)
class TaskStart:
    """A task to start; `env` is laid over the agent's own environment, from which `unset` was removed."""

    task: str
    program: Program
    env: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    mend_keras: bool = True


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
class Prepare:
    """Check every program and hold a port for every task, or say everything that stands in the way."""

    attempt: int
    tasks: list[TaskRequest]
    first_port: int
    last_port: int


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
class Prepared:
    """Everything is there; `ports` are held until the tasks have bound them."""

    attempt: int
    ports: dict[str, int]


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


@dataclass(frozen=True)
class Empty:
    """No process of the attempt is left on the node, and all of the logs is sent.

    `left_behind` counts the processes that outlived their task and had to be ended, `killed` those that did not
    heed TERM.
    """

    attempt: int
    left_behind: int
    killed: int


@dataclass(frozen=True)
class Broken:
    """The agent cannot go on (a full disk, say) and stops everything."""

    problem: Problem


ToAgent = Union[Hello, Attach, Prepare, Start, Stop, Beat, Goodbye]
ToController = Union[Ready, Attached, Prepared, Refused, Started, Listening, Log, Exited, Empty, Broken, Beat]
Message = Union[ToAgent, ToController]
