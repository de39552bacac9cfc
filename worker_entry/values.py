"""What messages are made of: frozen dataclasses that controller and agent both know. All times are Unix seconds."""

from __future__ import annotations

import os
import signal as signals
from dataclasses import dataclass, field
from typing import Optional


@dataclass(frozen=True)
class Program:
    """What a task runs: a Python `script` or `module` with its arguments, or a `command` whose target is argv[0]."""

    kind: str
    target: str
    args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CrashRecord:
    """An unhandled exception, as the interpreter in which it was raised saw it; `time` in Unix seconds.

    `thread`: the name of the thread that it ended, if that was not the main one; the program may have gone on.
    """

    time: float
    exception: str
    message: str
    file: Optional[str] = None
    line: Optional[int] = None
    thread: Optional[str] = None


@dataclass(frozen=True)
class Progress:
    """How far training has come in one process; the last values that its program told.

    `epoch` and `step` count from 1: what the program itself calls them, or, from `model.fit`, the steps since the
    program began. `batches` counts those of validation and prediction, too. `began` is when the first of the steps was
    done, and `time` when the last batch was. Before the first step is done, all of these are 0. `training`: whether the
    program is in the middle of it. `step_s`: seconds that a step takes of late; `own_s`: the same without the
    time in which the task waited for the others. A metric that is no finite number is None.
    """

    step: int
    first_step: int
    batches: int
    began: float
    time: float
    training: bool = True
    epoch: Optional[int] = None
    first_epoch: Optional[int] = None
    step_s: Optional[float] = None
    own_s: Optional[float] = None
    metrics: dict[str, Optional[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskStatus:
    """How far a running program has come, as a phrase that goes on from its name, and since when.

    `injected`: the faults of `--chaos` that were done to it.
    """

    phase: str
    since: float
    progress: Optional[Progress] = None
    injected: list[str] = field(default_factory=list)


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
    """What a task will need. `port`: a number to be honoured, or 0 for a free one of the range.

    `reuse_address`: the program binds it with SO_REUSEADDR, as most do, and not with SO_REUSEPORT, as TensorFlow.
    """

    task: str
    program: Program
    port: int = 0
    reuse_address: bool = False


@dataclass(frozen=True)
class TaskStart:
    """A task to start; `env` is laid over the agent's own environment, from which `unset` was removed.

    `joins`: whether TF_CONFIG is made here, of the cluster that all tasks of a Start have in common: a thousand tasks
    that know of each other are a million addresses.
    `heartbeat_s`: how long TensorFlow's workers wait for a sign of each other, 0 for as long as TensorFlow has it.
    `progress`: whether it is to tell how far its training has come. `injections`: faults to be done to it.
    """

    task: str
    program: Program
    env: dict[str, str] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    mend_keras: bool = True
    heartbeat_s: float = 0.0
    progress: bool = True
    injections: list[Injection] = field(default_factory=list)
    joins: bool = False


@dataclass(frozen=True)
class TaskOrder:
    """What the task runner is told, by a file.

    `crash_file`: where to write the crash record, if the program fails. `finished_file`: made when the program has
    come to its end; what fails after that is not the program. `status_file`: says how far the program has come.
    `stacks_file`: where the stacks are written on SIGURG. `child_file` and `child_crash_file`: as `status_file` and
    `crash_file`, for processes that the program starts. The rest is as in TaskStart.
    """

    program: Program
    crash_file: Optional[str] = None
    finished_file: Optional[str] = None
    status_file: Optional[str] = None
    stacks_file: Optional[str] = None
    child_file: Optional[str] = None
    child_crash_file: Optional[str] = None
    mend_keras: bool = True
    heartbeat_s: float = 0.0
    progress: bool = True
    injections: list[Injection] = field(default_factory=list)


@dataclass(frozen=True)
class GpuUse:
    """A GPU and its memory in MiB; `used_mib` is that of all processes."""

    name: str
    used_mib: int
    total_mib: int


@dataclass(frozen=True)
class Target:
    """An address to dial: one of those that `task` may be reached by."""

    task: str
    host: str
    port: int


@dataclass(frozen=True)
class DialResult:
    """What came of dialling a target; `failure` is empty when the task's own agent answered.

    Otherwise it is `unknown-name`, `refused`, `timed-out`, `no-route`, `other` (something else answered), or the
    system's own words. `resolved`: the addresses that the name stands for on the node that dialled.
    """

    target: Target
    resolved: list[str]
    failure: str = ""


@dataclass(frozen=True)
class FileEntry:
    """A file of a folder that is sent: its path in there, and its content's SHA-256; or where the `link` points."""

    path: str
    size: int = 0
    sha256: str = ""
    executable: bool = False
    link: str = ""
