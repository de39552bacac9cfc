"""Runs as a page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.gang import events as gang
from launcher.gang.checks.findings import Finding, NodeSpeed, SpeedReport
from launcher.pages.html import render_page
from launcher.pages.page_data import LogEnd, NodeSamples, PageData, TaskSamples
from launcher.report.journal_line import Message
from launcher.report.models import AttemptReport, CrashReport, ProgressReport, RunReport, TaskReport
from launcher.report.run_events import (
    AttemptEnded,
    Checkpoint,
    LinkDropped,
    Record,
    RunEvent,
    RunStarted,
    State,
)
from launcher.report.samples import NodeUseSample, ProgressSample, TaskUseSample
from launcher.tasks import TaskId
from launcher.verdict.models import Verdict
from tests.harness.browser import Browser
from tests.harness.polling import eventually
from worker_entry.protocol.samples import GpuSample, NodeSample, TaskSample
from worker_entry.protocol.values import CrashRecord, Progress, TaskExit

T0 = 1_795_342_600.0
W0, W1 = TaskId("worker", 0), TaskId("worker", 1)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\0\x1b[31m\u202e\u2028&'\""


def make_page_data(**changes: Any) -> PageData:
    facts: dict[str, Any] = {
        "run_id": "20261122-local-c36f",
        "name": "local-2",
        "directory": "/runs/x",
        "state": "failed",
        "running": False,
        "started": T0,
        "ended": T0 + 100,
        "now": T0 + 200,
        "plan": {"tasks": [{"task": "worker:0", "node": "gpu-a"}, {"task": "worker:1", "node": "gpu-b"}]},
        **changes,
    }
    return PageData(**facts)


def make_attempt(number: int, begin: float, end: float, *, failed: bool) -> AttemptReport:
    crash = CrashReport(time=end, exception="ValueError", message="no label", file="train.py", line=88)
    tasks = [
        TaskReport(
            task=str(task),
            node=node,
            address="",
            started=begin + 1,
            ended=end,
            exit_code=None if failed and task == W0 else int(failed),
            exit_signal=15 if failed and task == W0 else None,
            stopped_by_us=failed and task == W0,
            finished=not failed,
            crash=crash if failed and task == W1 else None,
            progress=ProgressReport(step=40, first_step=1, began=begin + 5, step_s=0.5),
            log=f"attempt-{number}/{task.file_name}.log",
        )
        for task, node in ((W0, "gpu-a"), (W1, "gpu-b"))
    ]
    verdict = Verdict(
        reference="task-failed" if failed else "succeeded",
        message="worker:1 on gpu-b exited with status 1" if failed else "both workers ended with status 0",
        task="worker:1" if failed else None,
        evidence=["worker:0 failed 0.1 s later because of it"] if failed else [],
    )
    return AttemptReport(attempt=number, started=begin, ended=end, tasks=tasks, verdict=verdict, processes_left=0)


def make_report(attempts: Sequence[AttemptReport], **changes: Any) -> RunReport:
    last = attempts[-1].verdict
    facts: dict[str, Any] = {
        "run_id": "20261122-local-c36f",
        "name": "local-2",
        "outcome": "succeeded" if last.reference == "succeeded" else "failed",
        "exit_status": 0 if last.reference == "succeeded" else 1,
        "versions": {"distlaunch": "0.1.0"},
        "directory": "/runs/x",
        "started": T0,
        "ended": T0 + 100,
        "verdict": last,
        "attempts": list(attempts),
        **changes,
    }
    return RunReport(**facts)


def record(at: float, event: RunEvent, attempt: int = 1, node: str = "") -> Record:
    return Record(T0 + at, attempt, event, node, 1 if node else 0)


def reported(task: TaskId, began: float, *, injected: tuple[str, ...] = ()) -> gang.TaskReported:
    progress = Progress(step=5, first_step=1, batches=5, began=T0 + began, time=T0 + began + 1, training=True)
    return gang.TaskReported(task, "is training", T0 + began - 1, progress, injected)


def one_attempt(number: int, begin: float, end: float, *, failed: bool) -> list[Record]:
    """Connects at `begin`, imports after 1 s, forms after 3 s, trains after 5 s, and ends 1 s before `end`."""
    records = [record(begin, State("connecting"), number)]
    records += [record(begin + 1, gang.TaskStarted(task, 7, T0 + begin + 1), number, "x") for task in (W0, W1)]
    records += [
        record(begin + 3, gang.TaskReported(task, "has imported TensorFlow", T0 + begin + 3), number, "x")
        for task in (W0, W1)
    ]
    records += [record(begin + 6, reported(task, begin + 5), number, "x") for task in (W0, W1)]
    if failed:
        crash = CrashRecord(T0 + end - 1, "ValueError", "no label", "train.py", 88)
        ended = gang.TaskExited(W1, TaskExit(code=1), T0 + end - 1, crash)
        records += [record(end - 1, ended, number, "x"), record(end - 1, State("stopping"), number)]
        records.append(record(end, gang.TaskExited(W0, TaskExit(signal=15), T0 + end), number, "x"))
    else:
        ends = [gang.TaskExited(task, TaskExit(code=0), T0 + end - 1, None, T0 + end - 1) for task in (W0, W1)]
        records += [record(end - 1, ended, number, "x") for ended in ends]
    report = make_attempt(number, T0 + begin, T0 + end, failed=failed)
    return [*records, record(end, AttemptEnded(report), number)]


def hostile_page_data() -> PageData:
    attempt = make_attempt(1, T0, T0 + 20, failed=True)
    samples = TaskSamples(
        attempt=1,
        task="worker:0",
        progress=[ProgressSample(T0 + n, n, metrics={HOSTILE: float(n), "__proto__": 1.0}) for n in range(3)],
    )
    use = [NodeUseSample(T0 + n, HOSTILE, NodeSample(1.0, 8, 5, 9, gpus=[GpuSample(HOSTILE, 0.5)])) for n in range(3)]
    verdict = Verdict(reference=HOSTILE, message=HOSTILE, task=HOSTILE, evidence=[HOSTILE], hint=HOSTILE)
    finding = Finding(level="warning", node=HOSTILE, reference=HOSTILE, message=HOSTILE)
    node = NodeSpeed(node=HOSTILE, method=HOSTILE, gflop_s=1.0, memory_gb_s=1.0)
    speed = SpeedReport(nodes=[node], links=[], findings=[finding], seconds=1.0)
    report = make_report([attempt], verdict=verdict, versions={HOSTILE: HOSTILE}, name=HOSTILE, speed=speed)
    return make_page_data(
        run_id=HOSTILE,
        name=HOSTILE,
        directory=HOSTILE,
        report=report,
        attempts=[attempt],
        records=[
            *one_attempt(1, 0, 20, failed=True),
            record(3, RunStarted(HOSTILE, HOSTILE, HOSTILE)),
            record(4, Message("note", HOSTILE * 1000)),
            record(5, LinkDropped(HOSTILE, HOSTILE)),
            record(6, Checkpoint(HOSTILE, T0 + 6)),
        ],
        tasks=[samples],
        nodes=[NodeSamples(attempt=1, node=HOSTILE, use=use)],
        logs=[LogEnd(1, HOSTILE, HOSTILE, [HOSTILE, "x" * 400])],
        plan={
            "tasks": [{"task": HOSTILE, "node": HOSTILE, "address": HOSTILE, "port": HOSTILE, "command": HOSTILE}],
            HOSTILE: [HOSTILE],
        },
        spec=HOSTILE,
        stacks=HOSTILE,
        command=HOSTILE,
    )


def to_curves(browser: Browser, selector: str) -> None:
    browser.run(f"document.querySelector('{selector}').scrollIntoView({{behavior: 'instant'}})")
    eventually(lambda: _check_in_view(browser))


def write_page(path: Path, *, points: int) -> Path:
    """The page of 8 workers with so many points each."""
    attempt = make_attempt(1, T0, T0 + points, failed=False)
    tasks = [
        TaskSamples(
            attempt=1,
            task=f"worker:{index}",
            progress=[
                ProgressSample(
                    *(T0 + n + index / 10, n, n // 100, 0.2 + n % 7 / 100, 0.1 + (n * index) % 11 / 100, 0.03),
                    {"loss": 10 / (n + 1), "accuracy": n / points},
                )
                for n in range(points)
            ],
            use=[
                TaskUseSample(T0 + n, TaskSample("x", n * 2.0 + n % 3, 1 << 30, 1.0, 0, 8, n * 100, n * 10))
                for n in range(0, points, 2)
            ],
        )
        for index in range(8)
    ]
    nodes = [
        NodeSamples(
            attempt=1,
            node=f"gpu-{index}",
            use=[NodeUseSample(T0 + n, "x", NodeSample(n * 7.0, 8, 5 + n % 9, 99, n, n)) for n in range(0, points, 2)],
        )
        for index in range(4)
    ]
    data = make_page_data(
        state="succeeded",
        ended=T0 + points,
        report=make_report([attempt], ended=T0 + points),
        attempts=[attempt],
        records=one_attempt(1, 0, points, failed=False),
        tasks=tasks,
        nodes=nodes,
    )
    path.write_text(render_page(data), encoding="utf-8")
    return path


def _check_in_view(browser: Browser) -> None:
    script = """[...document.querySelectorAll('.curves')].filter((each) => {
        const { top, bottom } = each.getBoundingClientRect();
        return bottom > 0 && top < innerHeight;
    }).map((each) => 'drawn' in each.dataset)"""
    found = browser.run(script)
    assert found
    assert all(found)
