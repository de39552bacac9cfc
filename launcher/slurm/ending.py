"""Why and when Slurm takes a job's nodes away: from the job's fields, and from Slurm's messages about its steps."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from launcher.gang.events import EndAnnounced
from launcher.slurm.calls import Fields
from worker_entry.protocol.frozen import dataclass

KILL_WAIT_S = 30.0
"""Slurm's own default."""
WARNED_S = 180.0
"""A signal this shortly before a job's time limit is a warning of the limit: `--signal` may come a minute early."""
_CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+?)(?:, [^*]*)?)? \*\*\*")
_MEMORY = re.compile(r"exceeded .*memory limit|oom.kill|Out Of Memory|Exceeded job memory", re.IGNORECASE)
_NODE = re.compile(r"node failure", re.IGNORECASE)

_ENDS = {
    "TIME LIMIT": ("preempted", "Slurm ended job {job} at its time limit"),
    "WARNING": ("preempted", "the time of job {job} is nearly over"),
    "PREEMPTION": ("preempted", "Slurm preempted job {job}"),
    "NODE FAILURE": ("node-lost", "Slurm lost a node of job {job}"),
    "JOB REQUEUE": ("preempted", "job {job} was requeued"),
    "CANCELLED": ("interrupted", "job {job} was cancelled"),
    "MEMORY": ("out-of-memory", "job {job} exceeded its memory limit"),
}
"""The class and the message of each reason."""
_STATES = {
    "TIMEOUT": "TIME LIMIT",
    "DEADLINE": "TIME LIMIT",
    "PREEMPTED": "PREEMPTION",
    "NODE_FAIL": "NODE FAILURE",
    "OUT_OF_MEMORY": "MEMORY",
    "CANCELLED": "CANCELLED",
    "COMPLETING": "CANCELLED",
}
"""Reasons by the state of the job; a job that is completing for no other reason was cancelled."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What Slurm reports about a job. Times are Unix seconds; None if not set.

    `restarts`: how often it was requeued. `can_requeue`: whether it is a batch job that may be requeued.
    """

    id: str
    state: str
    reason: str
    partition: str
    restarts: int
    can_requeue: bool
    ends: float | None
    preempted: float | None


def parse_job(fields: Fields) -> Job:
    """The job from its fields, as `scontrol show job` names them."""
    restarts = fields.get("Restarts", "0")
    return Job(
        id=fields.get("JobId", ""),
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        partition=fields.get("Partition", ""),
        restarts=int(restarts) if restarts.isdigit() else 0,
        can_requeue=fields.get("Requeue") == "1" and fields.get("BatchFlag", "0") != "0",
        ends=_parse_time(fields.get("EndTime", "")),
        preempted=_parse_time(fields.get("PreemptTime", "")),
    )


def _parse_time(text: str) -> float | None:
    """`2026-11-22T16:29:04` by this machine's clock; None for `Unknown` and the like."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def explain_end(
    job: Job | None, name: str, said: Sequence[str], *, restarts: int, since: float, now: float
) -> EndAnnounced | None:
    """Why the job ends, quoting Slurm; None if the job is not known to end.

    Args:
        job: the job now; None if Slurm does not answer.
        name: the job's id.
        said: Slurm's messages about our steps.
        restarts: how often the job had been requeued when it began.
        since: when the run began, in Unix seconds: an older preemption belongs to an earlier start of the job.
        now: Unix seconds.
    """
    found = _find_reason(job, said, restarts, since, now)
    if found is None:
        return None
    reference, message = _ENDS[found]
    words = [line for line in said if _CANCELLED.search(line) or _MEMORY.search(line) or _NODE.search(line)]
    evidence = [*dict.fromkeys(words)][-3:]
    if job is not None:
        evidence.append(f"scontrol: JobState={job.state} Reason={job.reason}")
    # If Slurm ends only steps, the job keeps its nodes.
    stays = found in ("MEMORY", "NODE FAILURE") and job is not None and job.state == "RUNNING"
    return EndAnnounced(reference, message.format(job=name), tuple(evidence), stays=stays)


def _find_reason(job: Job | None, said: Sequence[str], restarts: int, since: float, now: float) -> str | None:
    if any(_MEMORY.search(line) for line in said):
        return "MEMORY"
    for line in reversed(said):
        cancelled = _CANCELLED.search(line)
        if cancelled is not None and cancelled[1] in _ENDS:
            return cancelled[1]
    if job is None:
        return None
    if job.reason == "TimeLimit":
        return "TIME LIMIT"
    if job.preempted is not None and job.preempted >= int(since):
        return "PREEMPTION"
    if job.restarts > restarts:
        return "NODE FAILURE" if any(_NODE.search(line) for line in said) else "JOB REQUEUE"
    if job.state == "RUNNING" and job.ends is not None and job.ends - now < WARNED_S:
        return "WARNING"
    return _STATES.get(job.state)
