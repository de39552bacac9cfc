"""The Slurm job of a run: asks Slurm why nodes are taken away, and requeues the job to continue the run later."""

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
"""How long before Slurm's SIGKILL we kill tasks ourselves, to write the report; at most a third of the time left."""
WORDS_S = 0.5
"""How long Slurm's daemons may take after a signal to report its reason."""
RECHECK_S = 30.0
"""How often to ask for the job's time limit: an administrator may change it."""


class SlurmEngine:
    """The job of a run.

    Args:
        job: the job's ID.
        restarts: how often the job has been requeued before.
        ways: returns the current ways to the job's nodes.
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
        for way in self._ways():
            if isinstance(way, SlurmWay):
                way.said.clear()

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
        """Why the job ends, and how long its tasks may still run; None if no end of the job is known."""
        job = self._show()
        said = [line for way in self._ways() if isinstance(way, SlurmWay) for line in [*way.said]]
        found = explain_end(job, self.job, said, restarts=self._restarts, since=self._began, now=clock.now())
        return replace(found, grace_s=self._find_grace(job)) if found is not None else None

    def release(self) -> int | None:
        """Does nothing: Slurm releases the job's nodes when the job ends."""
        return None

    @property
    def is_requeued(self) -> bool:
        """Whether Slurm has queued the job again by itself."""
        job = self._show()
        return job is not None and job.restarts > self._restarts

    @property
    def can_requeue(self) -> bool:
        """Whether the job has been requeued or may be requeued; True if Slurm does not answer."""
        job = self._show()
        return job is None or job.restarts > self._restarts or job.can_requeue

    def requeue(self) -> None:
        """Requeues the job. Call it last: Slurm ends all processes of the job, including this one.

        Raises:
            SlurmError: the job cannot be requeued.
        """
        call(["scontrol", "requeue", self.job])

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


def find_engine(spec: ClusterSpec, ways: Callable[[], Iterable[object]]) -> SlurmEngine | None:
    """The Slurm job of this process, if the run depends on the job."""
    job = os.environ.get(JOB_ID, "")
    if not job.isdigit() or not (is_managed() or any(node.way == SLURM for node in spec.nodes)):
        return None
    return SlurmEngine(job, count_restarts(), ways, spec.slurm.stop_early_s)


def count_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often the job of this process has been requeued."""
    count = environ.get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0
