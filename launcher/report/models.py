"""The results of a run: frozen values from which the console, report.json and the exit status are made."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from launcher.gang.findings import DialReport, Finding, SpeedReport
from launcher.report.goodput import Goodput
from launcher.result import Result
from launcher.verdict.models import OutcomeName, Verdict


class CrashReport(Result):
    """An unhandled Python exception, seen in the task's own interpreter."""

    time: float
    """When it was raised, in Unix seconds by the controller's clock."""
    exception: str
    """The exception's class."""
    message: str
    """Its text; of more than 20,000 characters, the beginning and the end."""
    file: str | None = None
    """The innermost file that is the user's own code."""
    line: int | None = None
    """The line in that file."""
    thread: str | None = None
    """The thread that it ended, if not the main one."""


class ProgressReport(Result):
    """How far the training of one task got."""

    epoch: int | None = None
    """The epoch that was under way, from 1; null if the program reports none."""
    first_epoch: int | None = None
    """The epoch that this attempt began with."""
    step: int
    """Steps done: as the program counts them or, with `model.fit`, in this attempt."""
    first_step: int
    """The first step that was done."""
    began: float
    """When the first step was done, in Unix seconds."""
    step_s: float | None = None
    """Seconds that a step took, as last measured; null if it was never measured."""
    own_s: float | None = None
    """The same without the time for which the task waited for the others; null if that is unknown."""
    data_s: float | None = None
    """The part of a step during which it waited for its input."""
    metrics: dict[str, float | None] = {}
    """The last values reported; null for a value that is not a finite number."""


class TaskReport(Result):
    """One task of one attempt."""

    task: str
    """`worker:1`."""
    node: str
    """The machine that it ran on: the `host` of the spec."""
    address: str
    """`host:port` as in TF_CONFIG."""
    unguarded: str | None = None
    """Why others than the cluster could reach that port; null if they could not, or if it was never held."""
    pid: int | None = None
    """Its process ID on that machine; null if it was never started."""
    started: float | None = None
    """Unix seconds by the controller's clock, like all times; null if it was never started."""
    port_opened: float | None = None
    """When TensorFlow's server began to listen; null if it never did."""
    ended: float | None = None
    """When its process ended; null if that is unknown."""
    exit_code: int | None = None
    """The exit status, if the process ended by itself."""
    exit_signal: int | None = None
    """The signal that ended it, if one did."""
    core_dumped: bool = False
    """Whether that signal left a core dump."""
    finished: bool = False
    """Whether the program ran to its end, whatever the interpreter did afterwards."""
    stopped_by_us: bool = False
    """Whether it was still running when distlaunch stopped the attempt."""
    crash: CrashReport | None = None
    """The Python exception that it failed with, if any."""
    progress: ProgressReport | None = None
    """How far it got; null if it did no step, or reported none."""
    log: str
    """The log file, relative to the run's directory."""


class CompileCacheReport(Result):
    """What XLA has found and left in the folder that `cache` names, on all nodes."""

    loaded: int
    """Entries that were loaded, and so not compiled."""
    stored: int
    """Entries that were compiled and added."""


class AttemptReport(Result):
    """One start of all tasks."""

    attempt: int
    """Its number, from 1."""
    started: float
    """Unix seconds."""
    ended: float
    """When none of its processes was left."""
    cluster_up: float | None = None
    """When every task had opened its port."""
    last_progress: float | None = None
    """When it last made progress while it ran: a step, or output if the program reports none; null if it never ran."""
    tasks: list[TaskReport]
    """Every task, in the order of the plan."""
    verdict: Verdict
    """Why it ended."""
    processes_left: int | None = Field(ge=0)
    """Processes left on the nodes at the end: 0, or null if a node could not be asked."""
    unverified: list[str] = []
    """The nodes that could not be asked for processes left on them."""
    left_behind: int = 0
    """Processes that outlived their task, and were stopped."""
    killed: int = 0
    """Processes that ignored SIGTERM, and were killed."""
    compile_cache: CompileCacheReport | None = None
    """What the tasks did with the compile cache; null without `cache`, or if no node could count."""


class WarmNode(Result):
    """Processes that stay on a node with TensorFlow imported."""

    node: str
    """The node's host."""
    pids: list[int]
    """The agent, its guardian and its forkserver."""
    bytes: int
    """Memory of their own."""
    until: float
    """When they end by themselves, in Unix seconds."""


class LeftOutAttempts(Result):
    """What is kept of the attempts that the report leaves out, because the run had very many."""

    first: int
    """The first of them."""
    last: int
    """The last of them; all between the two are left out, too."""
    references: dict[str, int]
    """How many of them had each verdict, by its reference."""


class NodeReport(Result):
    """One node as the checks found it."""

    node: str
    """The `host` of the spec."""
    usable: bool
    """Whether its agent answered, and refused nothing."""
    hostname: str | None = None
    """The node's own name for itself."""
    address: str | None = None
    """The address for TF_CONFIG."""
    addresses: list[str] = []
    """All addresses of its interfaces but the loopback: TensorFlow listens on them all."""
    unguarded: dict[str, str] = {}
    """By task, why others than the cluster would reach its port; the ports of all other tasks are guarded."""
    executable: str | None = None
    """Its Python interpreter."""
    python: str | None = None
    """The version of that interpreter."""
    tensorflow: str | None = None
    """The version installed for that Python; null if there is none."""
    keras: str | None = None
    """The version installed for that Python; null if there is none."""
    cores: int | None = None
    """Cores that tasks may use."""
    gpus: list[str] = []
    """The GPUs' identifiers, each with its memory in use."""
    free_bytes: int | None = None
    """Free space on the disk of the run's files."""
    clock_offset_s: float | None = None
    """How far its clock is ahead of the controller's."""
    directory: str | None = None
    """Where the program runs."""
    program_hash: str | None = None
    """SHA-256 of the program's own code; empty where there is none to compare."""


class JobReport(Result):
    """The Slurm job that a run is in, and how Slurm ends it. Durations are in seconds."""

    job: str
    """Its id."""
    version: str
    """Slurm's version."""
    partition: str
    preempt_mode: str
    """What happens to a job that another one preempts: `OFF`, `REQUEUE`, `CANCEL`, …"""
    grace_s: float
    """From the warning of a preemption to its end; 0: there is no warning."""
    kill_wait_s: float
    """From SIGTERM to SIGKILL."""
    left_s: float | None
    """Until its time is over; null if it has no limit."""
    requeues: bool
    """Whether it can be queued again."""
    process_tracking: str
    """How Slurm finds the processes of a step."""


class CheckReport(Result):
    """What `distlaunch check --json` prints."""

    name: str
    """The name of the cluster, from the spec."""
    good: bool
    """Whether nothing keeps the cluster from starting."""
    nodes: list[NodeReport]
    """All nodes, in the order of the spec."""
    dials: list[DialReport]
    """One from every node to every task, those on the node itself included."""
    findings: list[Finding]
    """All errors and warnings, errors first."""
    slurm: JobReport | None = None
    """The Slurm job that distlaunch runs in, if `nodes: slurm` took its nodes."""
    speed: SpeedReport | None = None
    """What nodes and links do in a second, if that was measured; its findings are in `findings`, too."""


class FaultReport(Result):
    """A fault of `--chaos`, and what happened after it."""

    fault: str
    """`kill:worker:1@epoch=3`."""
    attempt: int | None = None
    """The attempt in which it was injected; null if its moment never came."""
    resumed: bool | None = None
    """Whether a later attempt resumed where an earlier one had been; null if no later one did a step."""
    message: str
    """One sentence."""


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
    """Where the files of the run are."""
    started: float
    """Unix seconds by the controller's clock, as it was set when the run began: differences are true durations."""
    ended: float
    """The same, when no process of the run was left."""
    verdict: Verdict
    """Why the run ended: the verdict on the last attempt, or on what ended the run outside of its attempts."""
    attempts: list[AttemptReport]
    """Every start of the cluster: one without restarts, none if the run ended first. Of more than 100, the first 20
    and the last 80."""
    left_out: LeftOutAttempts | None = None
    """What is kept of the attempts between those; null if there are none."""
    chaos: list[FaultReport] = []
    """The faults that were injected on purpose."""
    goodput: Goodput | None = None
    """Where the time went; null if the run ended before its first attempt."""
    speed: SpeedReport | None = None
    """What nodes and links did in a second before the first start; null if that was not measured, or by an earlier
    controller."""
    kept_warm: list[WarmNode] = []
    """What stays on the nodes on purpose, for the next run."""
    pods_left: int | None = None
    """Pods of the run that are left in Kubernetes; null if it made none, or if they could not be counted."""
