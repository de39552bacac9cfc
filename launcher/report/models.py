"""The results of a run: frozen values from which the console, report.json and the exit status are made."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from launcher.gang.checks.findings import DialReport, Finding, SpeedReport
from launcher.report.goodput import Goodput
from launcher.result import Result
from launcher.verdict.models import OutcomeName, Verdict


class CrashReport(Result):
    """An unhandled Python exception, seen in the task's own interpreter."""

    time: float
    """When the exception was raised, in Unix seconds by the controller's clock."""
    exception: str
    """The exception's class."""
    message: str
    """The exception's text; if it is longer than 20,000 characters, its beginning and end."""
    file: str | None = None
    """The innermost file that is the user's own code."""
    line: int | None = None
    """The line in that file."""
    thread: str | None = None
    """The thread that the exception ended, if not the main thread."""


class ProgressReport(Result):
    """How far the training of one task got."""

    epoch: int | None = None
    """The current epoch, from 1; null if the program reports none."""
    first_epoch: int | None = None
    """The epoch that this attempt began with."""
    step: int
    """Steps done, as the program counts them; with `model.fit`, in this attempt."""
    first_step: int
    """The first step that was done."""
    began: float
    """When the first step was done, in Unix seconds."""
    step_s: float | None = None
    """Seconds per step, as last measured; null if they were never measured."""
    own_s: float | None = None
    """The same without the time during which the task waited for the others; null if unknown."""
    data_s: float | None = None
    """Seconds per step during which the program waited for its input."""
    metrics: dict[str, float | None] = {}
    """The last reported values; null for a value that is not a finite number."""


class TaskReport(Result):
    """One task of one attempt."""

    task: str
    """`worker:1`."""
    node: str
    """The machine on which the task ran: the `host` of the spec."""
    address: str
    """`host:port` as in TF_CONFIG."""
    unguarded: str | None = None
    """Why unknown peers could reach that port; null if they could not, or if the port was never held."""
    pid: int | None = None
    """The process ID on that machine; null if the task was never started."""
    started: float | None = None
    """Unix seconds by the controller's clock, like all times; null if the task was never started."""
    port_opened: float | None = None
    """When TensorFlow's server began to listen; null if it never did."""
    ended: float | None = None
    """When the process ended; null if unknown."""
    exit_code: int | None = None
    """The exit status, if the process ended by itself."""
    exit_signal: int | None = None
    """The signal that ended the process, if any."""
    core_dumped: bool = False
    """Whether that signal left a core dump."""
    finished: bool = False
    """Whether the program ran to its end, whatever the interpreter did afterwards."""
    stopped_by_us: bool = False
    """Whether the task was still running when distlaunch stopped the attempt."""
    crash: CrashReport | None = None
    """The Python exception with which the task failed, if any."""
    progress: ProgressReport | None = None
    """How far the task got; null if it did or reported no step."""
    log: str
    """The log file, relative to the run's directory."""


class CompileCacheReport(Result):
    """The use of the folder that `cache` names, by XLA and `torch.compile`, on all nodes together."""

    loaded: int
    """Entries that were loaded instead of compiled."""
    stored: int
    """Entries that were compiled and added."""


class AttemptReport(Result):
    """One start of all tasks."""

    attempt: int
    """The attempt's number, from 1."""
    started: float
    """Unix seconds."""
    ended: float
    """When no process of the attempt was left."""
    cluster_up: float | None = None
    """When every task had opened its port."""
    last_progress: float | None = None
    """When the attempt last made progress while it was running: a step, or output if the program reports no steps; null
    if it was never running."""
    tasks: list[TaskReport]
    """Every task, in the order of the plan."""
    verdict: Verdict
    """Why the attempt ended."""
    processes_left: int | None = Field(ge=0)
    """Processes left on the nodes at the end: 0, or null if a node could not be asked."""
    unverified: list[str] = []
    """The nodes that could not be asked for leftover processes."""
    left_behind: int = 0
    """Processes that outlived their task, and were stopped."""
    killed: int = 0
    """Processes that ignored SIGTERM, and were killed."""
    divergence: str = ""
    """Where the models of the workers first differed; empty if they did not."""
    compile_cache: CompileCacheReport | None = None
    """How the tasks used the compile cache; null without `cache`, or if no node could count its entries."""


class WarmNode(Result):
    """Processes that stay on a node with TensorFlow imported."""

    node: str
    """The node's host."""
    pids: list[int]
    """The agent, its guardian and its forkserver."""
    bytes: int
    """Memory of these processes without mapped files; shared memory counts in proportion."""
    until: float
    """When these processes end by themselves, in Unix seconds."""


class LeftOutAttempts(Result):
    """Summary of the attempts that the report omits because the run had very many."""

    first: int
    """The first omitted attempt."""
    last: int
    """The last omitted attempt; all attempts between the two are omitted, too."""
    references: dict[str, int]
    """The number of omitted attempts with each verdict, by its reference."""


class FactsReport(Result):
    """A node's system, as `distlaunch doctor` examines it."""

    kernel: str
    """The operating system and its release."""
    missing: list[str]
    """What distlaunch would use and the system does not allow: `pidfd`, `port-filter`, …"""
    memory: int | None
    """Bytes of memory that processes may use."""
    open_files: int | None
    """The limit of open files of a process; null if there is none."""
    outgoing_ports: tuple[int, int] | None
    """The first and the last port that the kernel gives to outgoing connections."""
    reserved_ports: str
    """The ports that the kernel does not give to outgoing connections, like `20000-20999`."""
    driver: str | None
    """The version of NVIDIA's driver; null without GPUs."""
    tensorflow_gpus: int | None
    """How many GPUs TensorFlow sees; null without GPUs, or if TensorFlow cannot be imported."""


class NodeReport(Result):
    """One node as the checks found it."""

    node: str
    """The `host` of the spec."""
    usable: bool
    """Whether the node's agent answered, and refused nothing."""
    hostname: str | None = None
    """The node's own name for itself."""
    address: str | None = None
    """The address for TF_CONFIG."""
    addresses: list[str] = []
    """All addresses of the node's interfaces except the loopback; TensorFlow listens on all of them."""
    unguarded: dict[str, str] = {}
    """By task, why unknown peers can reach its port; the ports of all other tasks are guarded."""
    executable: str | None = None
    """The node's Python interpreter."""
    python: str | None = None
    """The version of that interpreter."""
    tensorflow: str | None = None
    """The version installed for that interpreter; null if not installed."""
    keras: str | None = None
    """The version installed for that interpreter; null if not installed."""
    cores: int | None = None
    """Cores that tasks may use."""
    gpus: list[str] = []
    """The GPUs' identifiers, each with its memory in use."""
    free_bytes: int | None = None
    """Free space on the disk of the run's files."""
    clock_offset_s: float | None = None
    """How far the node's clock is ahead of the controller's."""
    directory: str | None = None
    """The working directory of the program."""
    program_hash: str | None = None
    """SHA-256 of the program's own code; empty if no code can be compared."""
    facts: FactsReport | None = None
    """Only for `distlaunch doctor`."""


class JobReport(Result):
    """The Slurm job of a run, and how Slurm ends the job. Durations are in seconds."""

    job: str
    """The job's id."""
    version: str
    """Slurm's version."""
    partition: str
    preempt_mode: str
    """What happens to a job that another job preempts: `OFF`, `REQUEUE`, `CANCEL`, …"""
    grace_s: float
    """From the warning of a preemption to the end of the job; 0: no warning."""
    kill_wait_s: float
    """From SIGTERM to SIGKILL."""
    left_s: float | None
    """Until the job's time limit; null if it has none."""
    requeues: bool
    """Whether the job can be requeued."""
    process_tracking: str
    """How Slurm finds the processes of a step."""


class CheckReport(Result):
    """What `distlaunch check --json` prints."""

    name: str
    """The name of the cluster, from the spec."""
    ok: bool
    """Whether nothing keeps the cluster from starting."""
    nodes: list[NodeReport]
    """All nodes, in the order of the spec."""
    dials: list[DialReport]
    """From every node to every task, including its own tasks; with more than 64 nodes, from a selection of nodes."""
    findings: list[Finding]
    """All errors and warnings, errors first."""
    slurm: JobReport | None = None
    """The Slurm job that distlaunch runs in, if `nodes: slurm` took its nodes."""
    speed: SpeedReport | None = None
    """The measured speed of nodes and links; null if it was not measured. Its findings are also in `findings`."""


class FaultReport(Result):
    """A fault of `--chaos`, and what happened after it."""

    fault: str
    """`kill:worker:1@epoch=3`."""
    attempt: int | None = None
    """The attempt in which the fault was injected; null if its moment never came."""
    resumed: bool | None = None
    """Whether a later attempt resumed where an earlier attempt had been; null if no later attempt did a step."""
    message: str
    """One sentence."""


class CollectedNode(Result):
    """The files that `collect` brought from a node to the run's folder."""

    node: str
    """The node; its files are in `collected/`, in a folder of this name."""
    directory: str
    """The folder in which its tasks ran; empty if it is not known."""
    files: int
    """The number of files, without those that another node has on a disk that both share."""
    bytes: int
    """The total size of these files."""
    problem: str
    """Why some of them are missing; empty if none is."""


class Collection(Result):
    """The progress of a collection of files."""

    is_over: bool
    progress: str
    nodes: list[CollectedNode]


class RunReport(Result):
    """The content of `report.json`."""

    schema_version: Literal[1] = 1
    """Changes when a reader of older reports would no longer understand them."""
    run_id: str
    """The run's name, unique on the controller's machine."""
    name: str
    """The name of the cluster, from the spec."""
    outcome: OutcomeName
    """Whether every training task ended with status 0; `interrupted`: the user ended the run."""
    exit_status: int
    """distlaunch's own exit status."""
    versions: dict[str, str]
    """distlaunch, Python and TensorFlow (as installed on the first node)."""
    directory: str
    """The folder of the run's files."""
    started: float
    """Unix seconds by the controller's clock, as set when the run began, so that differences are true durations."""
    ended: float
    """When no process of the run was left, by the same clock."""
    verdict: Verdict
    """Why the run ended: the verdict on the last attempt, or on the event that ended the run outside its attempts."""
    attempts: list[AttemptReport]
    """Every start of the cluster: one without restarts, none if the run ended before the first. If there are more than
    100, the first 20 and the last 80."""
    left_out: LeftOutAttempts | None = None
    """Summary of the attempts between those; null if there are none."""
    chaos: list[FaultReport] = []
    """The faults that were injected on purpose."""
    goodput: Goodput | None = None
    """Where the time of the run went; null if the run ended before its first attempt."""
    speed: SpeedReport | None = None
    """The speed of nodes and links before the first start; null if this controller did not measure it."""
    kept_warm: list[WarmNode] = []
    """Processes that stay on the nodes on purpose, for the next run."""
    collected: list[CollectedNode] = []
    """The files that came to the run's folder, by node; nodes without such files are left out."""
    pods_left: int | None = None
    """Pods of the run that are left in Kubernetes; null if the run made none, or if they could not be counted."""

    def __repr__(self) -> str:
        """`<RunReport local-2-ab12: succeeded in 3 s>`; of another outcome, also the verdict."""
        from launcher.report.run_text import render_outcome

        verdict = "" if self.outcome == "succeeded" else f": {self.verdict.message} [{self.verdict.reference}]"
        return f"<RunReport {self.run_id}: {render_outcome(self)}{verdict}>"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """The report in a notebook."""
        from launcher.report.notebook import render_report

        return render_report(self)
