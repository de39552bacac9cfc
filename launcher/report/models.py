"""What came out of a run: frozen values that console, report.json and exit status are all made from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from launcher.gang.findings import DialReport, Finding
from launcher.result import Result
from launcher.verdict.models import OutcomeName, Verdict


class CrashReport(Result):
    """An unhandled Python exception, seen in the task's own interpreter."""

    time: float
    """The moment of the raise, in Unix seconds by the controller's clock."""
    exception: str
    """The exception's class."""
    message: str
    """Its text; of more than 20,000 characters the first and the last ones."""
    file: str | None = None
    """The innermost file that is the user's own code."""
    line: int | None = None
    """The line in that file."""
    thread: str | None = None
    """The thread that it ended, if that was not the main one."""


class ProgressReport(Result):
    """How far training had come in one task."""

    epoch: int | None = None
    """The epoch that was under way, from 1; null if the program reports none."""
    first_epoch: int | None = None
    """The one that this attempt began with."""
    step: int
    """Steps that were done: as the program counts them, or, by `model.fit`, in this attempt."""
    first_step: int
    """The first that was done."""
    began: float
    """When that was, in Unix seconds."""
    step_s: float | None = None
    """Seconds that a step took at last; null if it was never measured."""
    own_s: float | None = None
    """The same without what the task waited for the others; null where that is not known."""
    metrics: dict[str, float | None] = {}
    """The last values that were reported; null for what is not a finite number."""


class TaskReport(Result):
    """One task of one attempt."""

    task: str
    """`worker:1`."""
    node: str
    """The machine that it ran on: the `host` of the spec."""
    address: str
    """`host:port` as in TF_CONFIG."""
    pid: int | None = None
    """Its process, on that machine; null if it was never started."""
    started: float | None = None
    """Unix seconds by the controller's clock, like all times; null if it was never started."""
    port_opened: float | None = None
    """When TensorFlow's server listened; null if it never did."""
    ended: float | None = None
    """When its process ended; null if that was never seen."""
    exit_code: int | None = None
    """The exit status, if the process ended by itself."""
    exit_signal: int | None = None
    """The signal that ended it, if one did."""
    core_dumped: bool = False
    """Whether that signal left a core dump."""
    finished: bool = False
    """Whether the program came to its end, whatever the interpreter did afterwards."""
    stopped_by_us: bool = False
    """Whether it was still running when distlaunch stopped the attempt."""
    crash: CrashReport | None = None
    """The exception that it failed with, if it was one of Python's."""
    progress: ProgressReport | None = None
    """How far it had come; null if it did no step, or reported none."""
    log: str
    """The log file, relative to the run's directory."""


class AttemptReport(Result):
    """One start of all tasks."""

    attempt: int
    """Which start it is, from 1."""
    started: float
    """Unix seconds."""
    ended: float
    """When nothing was left of it."""
    cluster_up: float | None = None
    """When every task had opened its port."""
    tasks: list[TaskReport]
    """Every task, in the order of the plan."""
    verdict: Verdict
    """Why it ended."""
    processes_left: int | None = Field(ge=0)
    """Processes left on the nodes at the end: 0, or null if a node could not be asked."""
    unverified: list[str] = []
    """The nodes that could not be asked what is left on them."""
    left_behind: int = 0
    """Processes that had outlived their task and were ended."""
    killed: int = 0
    """Processes that ignored SIGTERM, and were killed."""


class LeftOutAttempts(Result):
    """Attempts of a run with very many, of which no more is kept than this."""

    first: int
    """The first of them."""
    last: int
    """The last of them; all between the two are left out as well."""
    references: dict[str, int]
    """How often each verdict was given, by its reference."""


class NodeReport(Result):
    """One node as the checks found it."""

    node: str
    """The `host` of the spec."""
    usable: bool
    """Whether its agent answered, and refused nothing."""
    hostname: str | None = None
    """What it calls itself."""
    address: str | None = None
    """The one for TF_CONFIG."""
    executable: str | None = None
    """Its Python."""
    python: str | None = None
    """The version of that."""
    tensorflow: str | None = None
    """As installed for that Python; null if it is not."""
    keras: str | None = None
    """The same."""
    cores: int | None = None
    """Cores that tasks may use."""
    gpus: list[str] = []
    """Their identifiers, each with its memory in use."""
    free_bytes: int | None = None
    """On the disk of the run's files."""
    clock_offset_s: float | None = None
    """How far its clock is ahead of the controller's."""
    directory: str | None = None
    """Where the program runs."""
    program_hash: str | None = None
    """SHA-256 of the program's own code; empty where there is none to compare."""


class CheckReport(Result):
    """What `distlaunch check --json` prints."""

    name: str
    """The name of the cluster, from the spec."""
    good: bool
    """Whether nothing keeps the cluster from being started."""
    nodes: list[NodeReport]
    """In the spec's order."""
    dials: list[DialReport]
    """Every pair, itself included."""
    findings: list[Finding]
    """Errors first."""


class FaultReport(Result):
    """A fault of `--chaos`, and what came of it."""

    fault: str
    """`kill:worker:1@epoch=3`."""
    attempt: int | None = None
    """The attempt that it was done in; null if its moment never came."""
    resumed: bool | None = None
    """Whether an attempt after it went on where one before had been; null if there was none."""
    message: str
    """One sentence."""


class RunReport(Result):
    """The content of `report.json`."""

    schema_version: Literal[1] = 1
    """Changes when a reader of older reports would no longer understand them."""
    run_id: str
    """Names this run; unique on the machine of the controller."""
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
    """Unix seconds by the controller's clock as it was set when the run began: differences are true durations."""
    ended: float
    """The same, when nothing was left of the run."""
    verdict: Verdict
    """Why it ended: that of the last attempt, or what ended the run outside of its attempts."""
    attempts: list[AttemptReport]
    """Every start of the cluster; without restarts there is one, and none if it was never tried. Of more than 100, the
    first 20 and the last 80."""
    left_out: LeftOutAttempts | None = None
    """What is known of the starts between those; null if there are none."""
    chaos: list[FaultReport] = []
    """What was done on purpose."""
