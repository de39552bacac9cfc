"""What must hold once a run has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.failures import FAILURES, USER_ERRORS, find_exit_status
from launcher.gang.events import NodeEmpty, TaskExited
from launcher.report.goodput import KINDS
from launcher.report.models import RunReport
from launcher.report.run_events import AttemptEnded, Record
from launcher.rundir.record import RecordedRun
from launcher.tasks import parse_task_id

if TYPE_CHECKING:
    from tests.sim.storm.world import World

KNOWN = {*FAILURES, *USER_ERRORS, "succeeded", "interrupted", "node-unreachable", "start-failed", "no-progress"}
NEWS_S = 2.0
"""How long the controller may not have known that a task has ended."""
JOURNAL_LIMIT, NODE_LIMIT = 300_000, 3_000
"""Bytes of a journal per attempt and controller: at most, and with many nodes, for each node."""


def check_end(world: World) -> None:
    """Checks the end of a run; reports to the world."""
    for rule, detail in _find_broken(world):
        world.break_rule(rule, detail)


def _find_broken(world: World) -> Iterator[tuple[str, str]]:
    left = [f"{task.name} on {machine.name}" for machine in world.machines.values() for task in machine.processes]
    agents = [agent.folder for machine in world.machines.values() for agent in machine.agents if not agent.is_over]
    if left or agents:
        yield "nothing left", f"still there: {left} {agents}"
    records = [*RecordedRun(world.files).read_records()]
    yield from _check_journal(world, records)
    yield from _check_logs(world, records)
    last = world.controllers[-1]
    report = last.report
    if report is not None:
        yield from _check_report(world, report, records)


def _check_journal(world: World, records: list[Record]) -> Iterator[tuple[str, str]]:
    ends = Counter(
        (record.attempt, record.event.task, record.event.start)
        for record in records
        if isinstance(record.event, TaskExited)
    )
    for (attempt, task, start), count in ends.items():
        if count > 1:
            yield "one end", f"{task} of attempt {attempt}, start {start}, has {count} ends"
    size = world.files.events.stat().st_size
    attempts = max((record.attempt for record in records), default=0)
    limit = max(JOURNAL_LIMIT, NODE_LIMIT * len(world.scenario.spec["nodes"]))
    if size > limit * (attempts + len(world.controllers)):
        yield "journal", f"{size} bytes"


def _check_logs(world: World, records: list[Record]) -> Iterator[tuple[str, str]]:
    whole = {(record.attempt, record.event.node) for record in records if isinstance(record.event, NodeEmpty)}
    for (attempt, task), written in world.written.items():
        path = world.files.log(attempt, parse_task_id(task))
        there = path.read_bytes() if path.exists() else b""
        node = world.clusters[attempt].tasks[task].machine.name
        is_whole = (attempt, node) in whole and not world.was_disk_full
        if world.was_disk_full and node == "local":
            continue
        if (there != written) if is_whole else not written.startswith(there):
            yield "logs", f"the log of {task} in attempt {attempt} has {there!r}, and it wrote {bytes(written)!r}"


def _check_report(world: World, report: RunReport, records: list[Record]) -> Iterator[tuple[str, str]]:
    references = [attempt.verdict.reference for attempt in report.attempts]
    for reference in (*references, report.verdict.reference):
        if reference not in KNOWN:
            yield "class", f"{reference!r} is no class of the contract"
    yield from _check_outcome(world, report)
    if report.attempts and world.clusters:
        yield from _check_success(world, report, records)
    yield from _check_budget(world, report, records)
    goodput = report.goodput
    if goodput is not None:
        parts, whole = sum(getattr(goodput, kind) for kind in KINDS), report.ended - report.started
        has_jumped = any(fault.kind == "jump" and fault.at == "controller" for fault in world.scenario.faults)
        if abs(parts - whole) > 1e-3 and not has_jumped:
            yield "goodput", f"its parts have {parts} s, and the run {whole} s: {goodput}"
        if any(getattr(goodput, kind) < -1e-6 for kind in KINDS):
            yield "goodput", f"a part is negative: {goodput}"


def _check_outcome(world: World, report: RunReport) -> Iterator[tuple[str, str]]:
    status = report.exit_status
    match report.outcome:
        case "succeeded":
            right = status == 0
        case "interrupted":
            right = status in {128 + signum for signum in world.asked} | {143}
            if not world.asked and not any(fault.what == "cancelled" for fault in world.scenario.faults):
                yield "outcome", f"nobody has interrupted the run: {report.verdict.message}"
        case _:
            right = status in {find_exit_status(report.verdict.reference), 2, 93}
    if not right:
        yield "status", f"{status} for {report.outcome}, {report.verdict.reference}"


def _check_success(world: World, report: RunReport, records: list[Record]) -> Iterator[tuple[str, str]]:
    """The run has succeeded if all trainers of its last attempt did; no attempt follows one that has."""
    if report.outcome == "succeeded":
        last = world.clusters.get(report.attempts[-1].attempt)
        trainers = last.trainers if last is not None else []
        failed = [task.name for task in trainers if not task.has_succeeded]
        if failed or not trainers:
            yield "success", f"the run succeeded, but {failed} did not"
    for attempt in report.attempts if not world.asked else ():
        cluster = world.clusters.get(attempt.attempt)
        if cluster is None or attempt.verdict.reference == "succeeded":
            continue
        known = {
            str(record.event.task)
            for record in records
            if record.attempt == attempt.attempt and isinstance(record.event, TaskExited) and not record.event.failed
        }
        until = min(cluster.stopped, cluster.ordered) - NEWS_S
        ended = {
            task.name
            for task in cluster.trainers
            if task.ended_at < until and task.ended is not None and task.ended.exit.ok
        }
        planned = {task.task for task in attempt.tasks if world.find_role(task.task) == "trainer"}
        if planned and planned <= ended & known:
            message = attempt.verdict.message
            yield "success", f"all trainers of attempt {attempt.attempt} ended with status 0, but it failed: {message}"


def _check_budget(world: World, report: RunReport, records: list[Record]) -> Iterator[tuple[str, str]]:
    counted = [
        record.event.ending
        for record in records
        if isinstance(record.event, AttemptEnded)
        and record.event.ending is not None
        and not record.event.ending.is_free
    ]
    spec, controllers = world.scenario.spec["restart"], len(world.controllers)
    if not spec["period_s"] and len(counted) > (spec["max_restarts"] + 1) * controllers:
        yield "budget", f"{len(counted)} attempts that count, with {spec['max_restarts']} restarts"
    numbers = [attempt.attempt for attempt in report.attempts]
    broken = (spec["max_restarts"] + 1) * controllers if world.scenario.program.breaks_after_s else 0
    if not spec["period_s"] and max(numbers, default=0) > 2 + 2 * len(world.scenario.faults) + broken:
        yield "budget", f"{max(numbers)} attempts with {len(world.scenario.faults)} faults"
