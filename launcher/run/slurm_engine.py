"""What a run within a Slurm job has to do with Slurm: it asks why nodes are taken away, and goes on in another turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from launcher.gang.events import EndAnnounced
from launcher.slurm.calls import JOB_ID, SlurmError, call, show_configuration, show_job, show_partition
from launcher.slurm.durations import parse_seconds
from launcher.slurm.ending import KILL_WAIT_S, Job, explain_end, parse_job
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM
from launcher.transports.slurm import SlurmWay
from worker_entry.protocol.frozen import replace
from worker_entry.system import clock
from worker_entry.system.engine import is_managed

MARGIN_S = 5.0
"""How long before Slurm's SIGKILL our own one comes, so that the report is written; at most a third of the time."""
WORDS_S = 0.5
"""How long after a signal Slurm's daemons may take to say why."""
RECHECK_S = 30.0
"""How often the end of the job's time is asked: an administrator may have changed it."""


class SlurmEngine:
    """The job of a run.

    Args:
        job: its id.
        restarts: how often the job has been requeued before.
        ways: the ways to its nodes now.
        stop_early_s: how long before the end of the job's time the tasks are stopped.
    """

    def __init__(self, job: str, restarts: int, ways: Callable[[], Iterable[object]], stop_early_s: float) -> None:
        self.job = job
        self._restarts = restarts
        self._ways = ways
        self._stop_early_s = stop_early_s
        self._began = clock.now()
        self._closed = threading.Event()

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        """Announces the end of the job's time, early enough for the tasks to save; unless that is left to Slurm."""
        if self._stop_early_s:
            threading.Thread(target=self._await_end, args=(put,), name="slurm time", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        """Asks Slurm why it has sent a signal; the answer comes in another thread."""

        def find() -> None:
            self._closed.wait(WORDS_S)
            answer(self.find_end())

        threading.Thread(target=find, name="slurm end", daemon=True).start()

    def forget(self) -> None:
        """Forgets what Slurm has said of earlier attempts."""
        for way in self._ways():
            if isinstance(way, SlurmWay):
                way.said.clear()

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
        """Why the job ends, and how long its tasks may still run; None if it goes on, as far as is known."""
        job = self._show()
        said = [line for way in self._ways() if isinstance(way, SlurmWay) for line in [*way.said]]
        found = explain_end(job, self.job, said, restarts=self._restarts, since=self._began, now=clock.now())
        return replace(found, grace_s=self._find_grace(job)) if found is not None else None

    def release(self) -> int | None:
        """The job's nodes are given back when it ends."""
        return None

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has queued the job again by itself."""
        job = self._show()
        return job is not None and job.restarts > self._restarts

    @property
    def can_requeue(self) -> bool:
        """Whether the job is queued again already, or may be, as far as is known."""
        job = self._show()
        return job is None or job.restarts > self._restarts or job.can_requeue

    def requeue(self) -> None:
        """Queues the job again, as the last act: Slurm ends all of its processes, this one included.

        Raises:
            SlurmError: it cannot be queued.
        """
        call(["scontrol", "requeue", self.job])

    def _show(self) -> Job | None:
        try:
            return parse_job(show_job(self.job))
        except SlurmError:
            return None

    def _find_grace(self, job: Job | None) -> float:
        """How long after a signal that has just come the tasks may run, before Slurm kills them and us."""
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


def find_engine(spec: ClusterSpec, ways: Callable[[], Iterable[object]]) -> SlurmEngine | None:
    """The job that this process belongs to, if the run depends on it; None if it does not."""
    job = os.environ.get(JOB_ID, "")
    if not job.isdigit() or not (is_managed() or any(node.way == SLURM for node in spec.nodes)):
        return None
    return SlurmEngine(job, count_restarts(), ways, spec.slurm.stop_early_s)


def count_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often the job of this process has been requeued."""
    count = environ.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0
