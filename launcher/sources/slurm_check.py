"""Checks a Slurm job before a run in it starts: how the job ends, and whether the program uses Slurm's resolver."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from launcher.gang.checks.findings import Finding
from launcher.report.models import JobReport
from launcher.slurm.calls import SlurmError, show_configuration, show_job, show_partition, version
from launcher.slurm.durations import parse_seconds
from launcher.slurm.ending import parse_job
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import ProgramSpec
from worker_entry.system import clock

RESOLVER = "SlurmClusterResolver"
PROGRAM_LIMIT = 4 << 20
"""Bytes of a program's file that are searched."""


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
