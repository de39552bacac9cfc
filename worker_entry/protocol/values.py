"""Parts of messages: frozen dataclasses that controller and agent share. All times are Unix seconds."""

from __future__ import annotations

import os
import signal as signals
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
from worker_entry.protocol.frozen import dataclass, field

Reference = Annotated[
    str, Matches(r"[a-z0-9]+(?:-[a-z0-9]+)*", "problem reference", barred=("succeeded", "interrupted", "checked"))
]
"""The stable kebab-case name of a problem; excludes the names of outcomes that are not problems."""


@dataclass(frozen=True)
class Program:
    """The program of a task: a Python `script` or `module` with arguments, or a `command` whose `target` is argv[0]."""

    kind: str
    target: str
    args: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's own code, and the library function that it called, if the function has a public name."""

    file: Line
    line: Number
    call: Optional[Name] = None


@dataclass(frozen=True)
class FirstError:
    """The exception from which another one follows, and the innermost line of the program in its traceback."""

    exception: Name
    message: Prose
    file: Optional[Line] = None
    line: Optional[Number] = None


@dataclass(frozen=True)
class CrashRecord:
    """An unhandled exception, recorded by the interpreter in which it was raised.

    `thread`: the name of the thread that the exception ended, if not the main thread; the program may have continued.
    `file` and `line` may be in a function that was traced into a graph; `place`: the line of the program itself.
    `exit_status`: that of a SystemExit. `first`: the first of the exceptions from which this one follows.
    """

    time: float
    exception: Name
    message: Prose
    file: Optional[Line] = None
    line: Optional[Number] = None
    thread: Optional[Name] = None
    place: Optional[SourceLine] = None
    exit_status: Optional[Number] = None
    first: Optional[FirstError] = None


EPOCH_ENDS = 16
"""Maximum number of ends of epochs in a status; of shorter epochs, the first ones may be missing."""


@dataclass(frozen=True)
class EpochEnd:
    """The end of an epoch: the number of the last step, and the metrics, as in `Progress`."""

    time: float
    step: Number
    epoch: Optional[Number]
    metrics: Annotated[dict[Name, Optional[float]], Items(2000)] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The progress of training in one process: the last values that its program reported.

    `epoch` and `step` are the program's own numbers or, with `model.fit`, the count since the program began, from 1.
    `batches` also counts batches of validation and prediction. `began`: when the first step was done. `time`: when the
    last batch was done. Before the first step is done, `first_step` is None and the other numbers are 0. `training`:
    whether training is in progress. `step_s`: the duration of a recent step; `own_s`: the same without the time in
    which the task waited for other tasks; `data_s`: the part of the step in which the program waited for input.
    `p99_s`: 99 of 100 batches were done within this time after the batch before them. A metric that is not a finite
    number, or exceeds 10^15, is None.

    `total_steps` and `total_epochs`: the step and the epoch at which training will end; None if unknown. `resumed`:
    how many steps the restored optimizer had done when training began; None if unknown. `epoch_ends`: the last ends of
    epochs; in a message, those that are new.
    """

    step: Number
    first_step: Optional[Number]
    batches: Number
    began: float
    time: float
    training: bool = True
    epoch: Optional[Number] = None
    first_epoch: Optional[Number] = None
    step_s: Optional[float] = None
    own_s: Optional[float] = None
    data_s: Optional[float] = None
    p99_s: Optional[float] = None
    total_steps: Optional[Number] = None
    total_epochs: Optional[Number] = None
    resumed: Optional[Number] = None
    metrics: Annotated[dict[Name, Optional[float]], Items(2000)] = field(default_factory=dict)
    epoch_ends: Annotated[list[EpochEnd], Items(EPOCH_ENDS)] = field(default_factory=list)


@dataclass(frozen=True)
class KerasPatch:
    """The patched Keras that a program uses for training: its version, and the number of patched faults.

    `changed`: places that are not patched because this version has neither the known fault nor its fix.
    """

    version: Name
    faults: Count
    changed: Annotated[list[Name], Items(100)] = field(default_factory=list)


MOST_PARTS = 1000
"""Maximum number of parts in a digest of a model."""


@dataclass(frozen=True)
class ModelDigest:
    """Digests of the variables of a model and its optimizer in one process, which are the same in all processes.

    They were computed in the process's call number `fit` of `model.fit`, after this `epoch` (from 1) or, if `ended`,
    after the last one. Each of `parts` belongs to the variable at its position in `names`, or to several variables, of
    which `names` has the first.
    """

    fit: Number
    epoch: Number
    ended: bool
    names: Annotated[list[Name], Items(MOST_PARTS)]
    parts: Annotated[list[Annotated[str, Matches("[0-9a-f]{8}", "digest")]], Items(MOST_PARTS)]

    @property
    def moment(self) -> tuple[int, int, bool]:
        return self.fit, self.epoch, self.ended


NOT_IMPORTED = "has not imported TensorFlow"
"""The first phase of a program."""
HAS_IMPORTED = ("has imported TensorFlow", "has imported JAX")
"""The phase when the program has its framework, and has not joined its cluster yet."""
HAS_JOINED = "has joined its cluster"
"""The phase when JAX has connected the program with all others; TensorFlow's strategies do not report it."""


@dataclass(frozen=True)
class TaskStatus:
    """The status of a running program: its phase, a phrase that follows the task's name in a sentence, and since when.

    `injected`: the injected faults of `--chaos`. `not_forked`: why a forked task was restarted as plain Python.
    `strategy`: the class of the program's tf.distribute strategy. `own_tf_config`: the program's line that sets
    TF_CONFIG; `own_tf_config_kept`: whether that value takes effect. `own_resolver`: a cluster resolver that does not
    find this cluster, and where it is built. `keras`: the patched Keras, if training uses it. `model`: the last digest;
    None if there is none, or if the agent has sent it before. `saves_when_preempted`: whether the program has built a
    PreemptionCheckpointHandler.
    """

    phase: Name
    since: float
    progress: Optional[Progress] = None
    injected: Annotated[list[Name], Items(1000)] = field(default_factory=list)
    not_forked: Line = ""
    strategy: Name = ""
    own_tf_config: Line = ""
    own_tf_config_kept: bool = False
    own_resolver: Line = ""
    keras: Optional[KerasPatch] = None
    model: Optional[ModelDigest] = None
    saves_when_preempted: bool = False


@dataclass(frozen=True)
class Activity:
    """The activity of a task besides its training steps.

    `idle_s`: seconds since the task's processes last used a tenth of a core, read or wrote files, or printed; None if
    unknown. `waits`: whether the task's main thread is blocked on a lock, another process or a child. `is_stuck`:
    whether only another task can wake the task: neither time nor a child, a device, a file or another connection.
    """

    idle_s: Optional[float] = None
    waits: bool = False
    is_stuck: bool = False


@dataclass(frozen=True)
class Injection:
    """A fault to inject into a task, once: `what` is `kill`, `stop`, `exit`, `preempt` or `full-disk`.

    `at` is `epoch`, `step` (0: before the first one), `save` (the middle of writing this task's checkpoint, counted
    from 1) or `seconds` (since the task's start), and `value` its number.
    """

    what: str
    at: str
    value: float

    def __str__(self) -> str:
        return f"{self.what}@{self.at}={self.value:g}"


@dataclass(frozen=True)
class TaskExit:
    """How a process ended: with an exit `code` or by a `signal`, never both and never folded into one number."""

    code: Optional[Annotated[int, Within(0, 255)]] = None
    signal: Optional[Annotated[int, Within(1, 127)]] = None
    core_dumped: bool = False

    @classmethod
    def from_wait_status(cls, status: int) -> TaskExit:
        """Decodes a wait status from `waitpid`."""
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
    """Why a node cannot carry out an order; `reference` is the error's stable kebab-case name."""

    reference: Reference
    message: Line
    hint: Line = ""
    task: Optional[OwnTask] = None


@dataclass(frozen=True)
class TaskRequest:
    """The requirements of a task. `port`: the required port, or 0 for any free port of the range.

    `reuse_address`: the program binds the port with SO_REUSEADDR, as most programs do, not with SO_REUSEPORT, as
    TensorFlow does.
    """

    task: TaskName
    program: Program
    port: int = 0
    reuse_address: bool = False


@dataclass(frozen=True)
class TaskStart:
    """A task to start; `env` is merged over the agent's environment without `unset`.

    `defaults`: the variables in `env` that yield to those of the agent's environment.
    `joins`: whether the agent makes TF_CONFIG, from the cluster that all tasks of a Start share: a TF_CONFIG for each
    of a thousand tasks would contain a million addresses.
    `coordination_timeout_s`: how long TensorFlow's workers wait for each other's heartbeats; 0: TensorFlow's default.
    `progress`: whether the task reports its training progress. `injections`: faults to inject into the task.
    `keep_own_tf_config`: whether a TF_CONFIG that the program sets takes effect. `stdin`: whether the task reads the
    controller's stdin; otherwise, its stdin is empty.
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
    defaults: list[str] = field(default_factory=list)
    stdin: bool = False


@dataclass(frozen=True)
class TaskOrder:
    """The order that the task runner reads from a file; fields that TaskStart also has mean the same.

    `crash_file`, `child_crash_file`: where to write the crash record if the program, or a child process, fails.
    `status_file`, `child_file`: the progress of the program and of a child process. `finished_file`: written when the
    program ends without a failure; a later failure is not the program's. `stacks_file`: where to write the stacks on
    SIGURG. `handler_file`: created before the program handles SIGTERM. `interrupted_file`: created when SIGINT raises
    KeyboardInterrupt in the program, or before the program sets a handler for SIGINT. `not_forked`: as in TaskStatus.
    """

    program: Program
    crash_file: Optional[str] = None
    finished_file: Optional[str] = None
    status_file: Optional[str] = None
    stacks_file: Optional[str] = None
    handler_file: Optional[str] = None
    interrupted_file: Optional[str] = None
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
    """A GPU and its memory in MiB; `used_mib` is the memory that all processes use together."""

    name: Name
    used_mib: Count
    total_mib: Count


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine for `distlaunch doctor`, in addition to the usual checks. Unknown values are empty or 0.

    `missing`: the features of `system.features` that do not work. `open_files`: the limit of a process; 0: none.
    `memory`: bytes that processes here may use. `outgoing_ports`: the first and the last port that the kernel gives to
    outgoing connections, without those in `reserved_ports`. `driver`: NVIDIA's version. `tensorflow_gpus`: how many
    GPUs TensorFlow sees; None if there are none or it cannot be imported.
    """

    kernel: Name
    missing: Annotated[list[Name], Items(64)]
    open_files: Count = 0
    memory: Count = 0
    outgoing_ports: Name = ""
    reserved_ports: Line = ""
    driver: Name = ""
    tensorflow_gpus: Optional[Count] = None


@dataclass(frozen=True)
class Target:
    """An address to dial, at which `task` may be reachable."""

    task: TaskName
    host: Name
    port: Port


@dataclass(frozen=True)
class DialResult:
    """The result of dialling a target; `failure` is empty when the task's own agent answered.

    Otherwise `failure` is `unknown-name`, `refused`, `timed-out`, `no-route`, `other` (another program answered), or
    the system's error text. `resolved`: the name's addresses on the dialling node. `source`: the dialling address.
    """

    target: Target
    resolved: Annotated[list[Name], Items(256)]
    failure: Name = ""
    source: Name = ""


@dataclass(frozen=True)
class FileEntry:
    """A file of a sent folder: its path in the folder, and its content's SHA-256 or, for a link, the target.

    A checkpoint's file has the time of its last change, in nanoseconds, instead of a hash.
    """

    path: Annotated[str, Path()]
    size: Count = 0
    sha256: Name = ""
    executable: bool = False
    link: Annotated[str, Path()] = ""
    changed: Annotated[int, Within(0, 1 << 63)] = 0
