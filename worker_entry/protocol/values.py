"""What messages are made of: frozen dataclasses that controller and agent both know. All times are Unix seconds."""

from __future__ import annotations

import os
import signal as signals
from dataclasses import dataclass, field
from typing import Annotated, Optional

from worker_entry.protocol.field_limits import (
    Count,
    Items,
    Line,
    Matches,
    Name,
    Number,
    OwnTask,
    Path,
    Port,
    Prose,
    TaskName,
    Within,
)

Reference = Annotated[
    str, Matches(r"[a-z0-9]+(?:-[a-z0-9]+)*", "reference of a problem", barred=("succeeded", "interrupted", "checked"))
]
"""The stable kebab-case name of a problem; outcomes that are none cannot be claimed with it."""


@dataclass(frozen=True)
class Program:
    """What a task runs: a Python `script` or `module` with its arguments, or a `command` whose target is argv[0]."""

    kind: str
    target: str
    args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """A line of the user's own code, and the library's function that it has called, if that has a public name."""

    file: Line
    line: Number
    call: Optional[Name] = None


@dataclass(frozen=True)
class CrashRecord:
    """An unhandled exception, as the interpreter in which it was raised saw it; `time` in Unix seconds.

    `thread`: the name of the thread that it ended, if that was not the main one; the program may have gone on.
    `file` and `line` may be in a function that the program has made a graph of; `place`: where the program itself was.
    """

    time: float
    exception: Name
    message: Prose
    file: Optional[Line] = None
    line: Optional[Number] = None
    thread: Optional[Name] = None
    place: Optional[Place] = None


@dataclass(frozen=True)
class Progress:
    """How far training has come in one process; the last values that its program told.

    `epoch` and `step` count from 1: what the program itself calls them, or, from `model.fit`, the steps since the
    program began. `batches` counts those of validation and prediction, too. `began` is when the first of the steps was
    done, and `time` when the last batch was. Before the first step is done, all of these are 0. `training`: whether the
    program is in the middle of it. `step_s`: seconds that a step takes of late; `own_s`: the same without the
    time in which the task waited for the others. A metric that is no finite number is None.
    """

    step: Number
    first_step: Number
    batches: Number
    began: float
    time: float
    training: bool = True
    epoch: Optional[Number] = None
    first_epoch: Optional[Number] = None
    step_s: Optional[float] = None
    own_s: Optional[float] = None
    metrics: Annotated[dict[Name, Optional[float]], Items(2000)] = field(default_factory=dict)


@dataclass(frozen=True)
class KerasPatch:
    """What was patched of the Keras that a program trains with: its version, and the number of faults."""

    version: Name
    faults: Count


NOT_IMPORTED = "has not imported TensorFlow"
"""The first phase of a program."""


@dataclass(frozen=True)
class TaskStatus:
    """How far a running program has come, as a phrase that goes on from its name, and since when.

    `injected`: the faults of `--chaos` that were done to it. `not_forked`: why it has started again as plain Python.
    `strategy`: the class of the tf.distribute strategy that it has built. `own_tf_config`: the line by which it sets a
    TF_CONFIG of its own, and whether that has an effect. `keras`: what was patched, once it trains with Keras.
    """

    phase: Name
    since: float
    progress: Optional[Progress] = None
    injected: Annotated[list[Name], Items(1000)] = field(default_factory=list)
    not_forked: Line = ""
    strategy: Name = ""
    own_tf_config: Line = ""
    own_tf_config_kept: bool = False
    keras: Optional[KerasPatch] = None


@dataclass(frozen=True)
class Activity:
    """What a task does besides steps.

    `idle_s`: seconds since its processes last used a tenth of a core, read or wrote files, or printed; None where that
    is not known. `waits`: whether its main thread sleeps until a lock, another process or a child lets it go on.
    """

    idle_s: Optional[float] = None
    waits: bool = False


@dataclass(frozen=True)
class Injection:
    """A fault to be done to a task, once: `what` is `kill`, `stop`, `exit` or `preempt`.

    `at` is `epoch`, `step` or `seconds`, of which `value` is the one that counts; seconds are those since its start.
    """

    what: str
    at: str
    value: float

    def __str__(self) -> str:
        return f"{self.what}@{self.at}={self.value:g}"


@dataclass(frozen=True)
class TaskExit:
    """How a process ended: by an exit `code` or by a `signal`, never both and never folded into one number."""

    code: Optional[Annotated[int, Within(0, 255)]] = None
    signal: Optional[Annotated[int, Within(1, 127)]] = None
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

    reference: Reference
    message: Line
    hint: Line = ""
    task: Optional[OwnTask] = None


@dataclass(frozen=True)
class TaskRequest:
    """What a task will need. `port`: a number to be honoured, or 0 for a free one of the range.

    `reuse_address`: the program binds it with SO_REUSEADDR, as most do, and not with SO_REUSEPORT, as TensorFlow.
    """

    task: TaskName
    program: Program
    port: int = 0
    reuse_address: bool = False


@dataclass(frozen=True)
class TaskStart:
    """A task to start; `env` is laid over the agent's own environment, from which `unset` was removed.

    `joins`: whether TF_CONFIG is made here, of the cluster that all tasks of a Start have in common: a thousand tasks
    that know of each other are a million addresses.
    `coordination_timeout_s`: how long TensorFlow's workers wait for a sign of each other; 0: its default.
    `progress`: whether it is to tell how far its training has come. `injections`: faults to be done to it.
    `keep_own_tf_config`: whether a TF_CONFIG that the program sets counts.
    """

    task: TaskName
    program: Program
    env: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    patch_keras: bool = True
    coordination_timeout_s: float = 0.0
    progress: bool = True
    injections: list[Injection] = field(default_factory=list)
    joins: bool = False
    keep_own_tf_config: bool = False


@dataclass(frozen=True)
class TaskOrder:
    """What the task runner is told, by a file.

    `crash_file`: where to write the crash record, if the program fails. `finished_file`: made when the program has
    come to its end; what fails after that is not the program. `status_file`: says how far the program has come.
    `stacks_file`: where the stacks are written on SIGURG. `not_forked`: why a forked task has started again as plain
    Python, if it has. `child_file` and `child_crash_file`: as `status_file` and
    `crash_file`, for processes that the program starts. The rest is as in TaskStart.
    """

    program: Program
    crash_file: Optional[str] = None
    finished_file: Optional[str] = None
    status_file: Optional[str] = None
    stacks_file: Optional[str] = None
    child_file: Optional[str] = None
    child_crash_file: Optional[str] = None
    patch_keras: bool = True
    coordination_timeout_s: float = 0.0
    progress: bool = True
    injections: list[Injection] = field(default_factory=list)
    not_forked: str = ""
    keep_own_tf_config: bool = False


@dataclass(frozen=True)
class GpuUse:
    """A GPU and its memory in MiB; `used_mib` is that of all processes."""

    name: Name
    used_mib: Count
    total_mib: Count


@dataclass(frozen=True)
class Target:
    """An address to dial: one of those that `task` may be reached by."""

    task: TaskName
    host: Name
    port: Port


@dataclass(frozen=True)
class DialResult:
    """What came of dialling a target; `failure` is empty when the task's own agent answered.

    Otherwise it is `unknown-name`, `refused`, `timed-out`, `no-route`, `other` (something else answered), or the
    system's own words. `resolved`: the addresses that the name stands for on the node that dialled.
    """

    target: Target
    resolved: Annotated[list[Name], Items(256)]
    failure: Name = ""


@dataclass(frozen=True)
class FileEntry:
    """A file of a folder that is sent: its path in there, and its content's SHA-256; or where the `link` points."""

    path: Annotated[str, Path()]
    size: Count = 0
    sha256: Name = ""
    executable: bool = False
    link: Annotated[str, Path()] = ""
