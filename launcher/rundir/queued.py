"""Runs that wait for Slurm because their jobs are queued or requeued."""

from __future__ import annotations

import os
from collections.abc import Sequence

from launcher.rundir.record import RunRecord
from launcher.slurm.calls import JOB_ID, SlurmError, call, show_job
from launcher.slurm.step import make_environment, make_step
from worker_entry.protocol.frozen import dataclass

ASK_SLURM_S = 5.0
"""How often to ask whether a run's job is still queued."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "COMPLETING")


@dataclass(frozen=True)
class Queued:
    """A queued Slurm job; `reason`: why the job does not run yet, in Slurm's words."""

    job: str
    state: str
    reason: str

    @property
    def has_ended(self) -> bool:
        return self.state not in (*WAITING, "RUNNING", "SUSPENDED", "STOPPED")


def look_up(job: str) -> Queued | None:
    """The job's state in the queue; None if Slurm no longer knows the job, or does not answer."""
    try:
        state, _, reason = call(["squeue", "-h", "--states=all", "-j", job, "-o", "%T %r"]).strip().partition(" ")
    except SlurmError:
        return None
    return Queued(job, state, reason) if state else None


def find_queued(record: RunRecord) -> Queued | None:
    """The run's job, if the run waits for the job to start or restart."""
    if not record.waits:
        return None
    found = look_up(record.job)
    return None if found is None or found.has_ended else found


def run_in_job(job: str, words: Sequence[str]) -> None:
    """Replaces this process with a step of the job on the node that runs the job's script; returns only on failure."""
    try:
        host = show_job(job).get("BatchHost", "")
        is_there = (os.environ.get(JOB_ID), os.environ.get("SLURMD_NODENAME")) == (job, host)
        if host and not is_there:
            step = make_step(job, host)
            os.execvpe(  # noqa: S606 - the user's own words
                step[0], [*step, *words], make_environment(os.environ)
            )
    except (OSError, SlurmError):
        return


def cancel(job: str, *, now: bool = False) -> None:
    """Cancels the job; `now`: kills all of its processes at once.

    Raises:
        SlurmError: Slurm does not cancel the job.
    """
    if now:
        call(["scancel", "--signal=KILL", "--full", job])
    call(["scancel", job])
