"""A worker that keeps the others waiting is reported with a reason; one slow second is not enough."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from launcher.controller.supervisor import Supervisor
from launcher.gang.state import Phase
from launcher.report.run_events import Record, Straggler
from launcher.report.status_report import TaskState, make_task_states
from tests.harness.builders.gang import W1
from tests.harness.builders.stragglers import ENOUGH_S
from tests.sim.nodes import At, Deed, FakeAgent, FakeRun
from worker_entry.protocol.messages import Sampled, Status
from worker_entry.protocol.samples import TaskSample
from worker_entry.protocol.values import Progress, TaskStatus

COVERS = ("launcher/gang", "worker_entry/hooks", "worker_entry/task/meter.py")


class WatchedRun(FakeRun):
    """Keeps the state of the tasks when a straggler is recorded."""

    def supervisor(self) -> Supervisor:
        supervisor = super().supervisor()
        self.records: list[Straggler] = []
        self.states: list[list[TaskState]] = []

        def note(record: Record) -> None:
            if isinstance(record.event, Straggler):
                loop = supervisor.loop
                assert loop is not None
                self.records.append(record.event)
                self.states.append(make_task_states(loop.state, loop.plan, loop.usage.tasks, loop.standings))

        self.context.journal.listen(note)
        return supervisor


def take(task: str, own_s: float, data_s: float, cpu_s: float) -> Deed:
    """Every second, the task reports steps with these times, and its node reports the task's usage."""

    def do(agent: FakeAgent) -> bool:
        def report(second: int) -> None:
            now = agent.now()
            progress = Progress(second, 1, second, now, now, step_s=0.3 + second / 1e9, own_s=own_s, data_s=data_s)
            agent.answer(Status(task, TaskStatus("is training", now, progress)))
            agent.answer(Sampled(now, [TaskSample(task, cpu_s * second, 1 << 20, 0.01 * second)]))

        for second in range(1, ENOUGH_S):
            agent.later(second, partial(report, second))
        return True

    return do


def test_a_straggler_is_logged_recorded_and_shown_with_its_reason(tmp_path: Path) -> None:
    fast, slow = take("worker:0", 0.05, 0.01, 0.5), take("worker:1", 0.25, 0.2, 0.5)
    run = WatchedRun(tmp_path / "run", [At(Phase.RUNNING, fast, node="gpu-a"), At(Phase.RUNNING, slow, node="gpu-b")])
    run.run()
    [record] = run.records
    assert record.message == (
        "worker:1 takes 5.0 × the median step: 250 ms of its own, the others 50 ms, and then they wait for it; "
        "reason: input pipeline (it waits 200 ms for its input, the others 10 ms)"
    )
    assert (record.task, record.score, record.reason) == (W1, 0.2, "input pipeline")
    assert record.message in run.said
    [[of_fast, of_slow]] = run.states
    assert (of_fast.score, of_fast.slow, of_fast.data_s) == (5.0, "", 0.01)
    assert (of_slow.score, of_slow.slow, of_slow.data_s) == (0.2, "input pipeline", 0.2)
