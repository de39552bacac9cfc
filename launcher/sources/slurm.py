"""The Slurm job of a run: checks it before the start, asks Slurm why nodes are taken away, and requeues the job."""

from __future__ import annotations

import io
import os
import threading
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from launcher.gang.checks.findings import Finding
from launcher.gang.events import EndAnnounced
from launcher.report.models import JobReport
from launcher.slurm.calls import JOB_ID, SlurmError, call, show_configuration, show_job, show_partition, version
from launcher.slurm.durations import parse_seconds
from launcher.slurm.ending import KILL_WAIT_S, Job, explain_end, parse_job
from launcher.sources.base import NodeSource
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM
from launcher.spec.parts import ProgramSpec
from launcher.transports.slurm import SlurmConnector
from worker_entry.protocol.frozen import replace
from worker_entry.system import clock
from worker_entry.system.engine import is_managed

MARGIN_S = 5.0
"""How long before Slurm's SIGKILL we kill tasks ourselves, to write the report; at most a third of the time left."""
WORDS_S = 0.5
"""How long Slurm's daemons may take after a signal to report its reason."""
RECHECK_S = 30.0
"""How often to ask for the job's time limit: an administrator may change it."""
RESOLVER = "SlurmClusterResolver"
PROGRAM_LIMIT = 4 << 20
"""Bytes of a program's file that are searched."""


class SlurmJob(NodeSource):
    """The job of a run.

    Args:
        job: the job's ID.
        restarts: how often the job has been requeued before.
        connectors: returns the current connectors to the job's nodes.
        stop_early_s: how long before the end of the job's time the tasks are stopped.
    """

    def __init__(
        self, job: str, restarts: int, connectors: Callable[[], Iterable[object]], stop_early_s: float
    ) -> None:
        self.job = job
        self._restarts = restarts
        self._connectors = connectors
        self._stop_early_s = stop_early_s
        self._began = clock.now()
        self._closed = threading.Event()

    def find_problems(self, spec: ClusterSpec, cwd: str) -> Iterator[Finding]:
        if spec.source == SLURM:
            yield from find_program_problems(spec, cwd)

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        """Announces the job's time limit early enough for the tasks to save, if `stop_early_s` asks for it."""
        if self._stop_early_s:
            threading.Thread(target=self._await_end, args=(put,), name="slurm time", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        """Asks Slurm why it sent a signal; calls `answer` in another thread."""

        def find() -> None:
            self._closed.wait(WORDS_S)
            answer(self.find_end())

        threading.Thread(target=find, name="slurm end", daemon=True).start()

    def forget(self) -> None:
        """Forgets Slurm's messages about earlier attempts."""
        for connector in self._connectors():
            if isinstance(connector, SlurmConnector):
                connector.said.clear()

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
        """Why the job ends, and how long its tasks may still run; None if no end of the job is known."""
        del lost
        job = self._show()
        said = [
            line
            for connector in self._connectors()
            if isinstance(connector, SlurmConnector)
            for line in [*connector.said]
        ]
        found = explain_end(job, self.job, said, restarts=self._restarts, since=self._began, now=clock.now())
        return replace(found, grace_s=self._find_grace(job)) if found is not None else None

    def will_return(self, tell: Callable[[str], None]) -> bool:
        """Whether the job has been requeued or may be requeued; True if Slurm does not answer."""
        job = self._show()
        if job is not None and not self._is_requeued(job) and not job.can_requeue:
            hint = "continue in another job with `distlaunch resume`"
            tell(f"Slurm does not requeue job {self.job} (no `--requeue`, or not a batch job); {hint}")
            return False
        tell(f"Job {self.job} is requeued; the run continues when the job starts")
        return True

    def requeue(self) -> None:
        """Requeues the job, unless Slurm has done so by itself: Slurm ends all processes of the job, this one too.

        Raises:
            SlurmError: the job cannot be requeued.
        """
        job = self._show()
        if job is None or not self._is_requeued(job):
            call(["scontrol", "requeue", self.job])

    def _is_requeued(self, job: Job) -> bool:
        return job.restarts > self._restarts

    def _show(self) -> Job | None:
        try:
            return parse_job(show_job(self.job))
        except SlurmError:
            return None

    def _find_grace(self, job: Job | None) -> float:
        """How long the tasks may run after a signal that has just arrived, before Slurm kills them and us."""
        wait_s = KILL_WAIT_S
        try:
            wait_s = parse_seconds(show_configuration().get("KillWait", "")) or KILL_WAIT_S
            if job is not None and job.state == "RUNNING" and job.preempted is not None:
                grace_s = parse_seconds(show_partition(job.partition).get("GraceTime", ""))
                wait_s += max(job.preempted + grace_s - clock.now(), 0.0)
            elif job is not None and job.state == "RUNNING" and job.ends is not None:
                wait_s += max(job.ends - clock.now(), 0.0)
        except SlurmError:
            pass
        return wait_s - min(MARGIN_S, wait_s / 3)

    def _await_end(self, put: Callable[[EndAnnounced], None]) -> None:
        while True:
            job = self._show()
            ends = job.ends if job is not None else None
            left_s = ends - clock.now() if ends is not None else None
            if left_s is not None and left_s <= self._stop_early_s:
                break
            wait_s = RECHECK_S if left_s is None else min(left_s - self._stop_early_s, RECHECK_S)
            if self._closed.wait(max(wait_s, 0.1)):
                return
        message = f"the time of job {self.job} ends in {max(left_s, 0):.0f} s"
        margin_s = min(MARGIN_S, self._stop_early_s / 3)
        put(EndAnnounced("preempted", message, (), max(self._stop_early_s - margin_s, 0.0)))


def find_slurm_job(spec: ClusterSpec, connectors: Callable[[], Iterable[object]]) -> SlurmJob | None:
    """The Slurm job of this process, if the run depends on the job."""
    job = os.environ.get(JOB_ID, "")
    if not job.isdigit() or not (is_managed() or any(node.connection == SLURM for node in spec.nodes)):
        return None
    return SlurmJob(job, count_restarts(), connectors, spec.slurm.stop_early_s)


def count_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often the job of this process has been requeued."""
    count = environ.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


def report_job(job: str) -> JobReport:
    """Reports how Slurm handles this job.

    Raises:
        SlurmError: Slurm does not answer.
    """
    found = parse_job(show_job(job))
    partition, configuration = show_partition(found.partition), show_configuration()
    mode = partition.get("PreemptMode", "")
    return JobReport(
        job=job,
        version="{}.{:02}".format(*version()),
        partition=found.partition,
        preempt_mode=mode if mode not in ("", "(null)") else configuration.get("PreemptMode", ""),
        grace_s=parse_seconds(partition.get("GraceTime", "")),
        kill_wait_s=parse_seconds(configuration.get("KillWait", "")),
        left_s=max(found.ends - clock.now(), 0.0) if found.ends is not None else None,
        requeues=found.can_requeue,
        process_tracking=configuration.get("ProctrackType", ""),
    )


def find_program_problems(spec: ClusterSpec, cwd: str) -> Iterator[Finding]:
    """Warnings about the program; `cwd`: where the program runs by default."""
    if uses_resolver(spec.program, Path(spec.working_directory or cwd)):
        yield Finding(
            level="warning",
            node="",
            reference="slurm-resolver",
            message=f"the program uses {RESOLVER}, which sorts nodes as text and uses ports from 8888 on",
            hint="remove it: MultiWorkerMirroredStrategy() takes the cluster from TF_CONFIG, which is complete",
        )


def find_job_problems(spec: ClusterSpec, job: str, report: JobReport | None) -> Iterator[Finding]:
    """Warnings about the job.

    Args:
        spec: the spec of the run in the job.
        job: the job's ID.
        report: the report on the job; None if Slurm does not answer.
    """
    if report is None:
        yield Finding(level="warning", node="", reference="slurm", message=f"Slurm does not report job {job}")
        return
    if spec.restart.max_restarts and not report.requeues:
        message = f"job {job} is not requeued at its end: it is not a batch job, or has --no-requeue"
        yield Finding(level="warning", node="", reference="no-requeue", message=message)
    if report.left_s is not None and report.left_s <= spec.slurm.stop_early_s:
        early = f"`slurm.stop_early_s` stops tasks {spec.slurm.stop_early_s:g} s before its end"
        message = f"job {job} has {report.left_s:.0f} s left; {early}"
        yield Finding(level="warning", node="", reference="no-time", message=message)


def uses_resolver(program: ProgramSpec, folder: Path) -> bool:
    """Whether the program's own file names TensorFlow's Slurm resolver outside of comments and strings."""
    if program.script is not None:
        path = folder / program.script
    elif program.module is not None:
        path = folder / f"{program.module.replace('.', '/')}.py"
    else:
        return False
    try:
        with path.open("rb") as file:
            words = tokenize.tokenize(io.BytesIO(file.read(PROGRAM_LIMIT)).readline)
            return any(word.type == tokenize.NAME and word.string == RESOLVER for word in words)
    except (OSError, SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return False


def ask_job(job: str) -> JobReport | None:
    """Like `report_job`; None if Slurm does not answer."""
    try:
        return report_job(job)
    except SlurmError:
        return None
