"""Summarizes the current state of a run from its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from launcher.errors import EXIT_INFRASTRUCTURE
from launcher.plan.paths import RunPaths
from launcher.report.journal_line import Line
from launcher.report.state_names import LiveState, Outcome, RunState
from launcher.rundir.directory import RunDir
from launcher.rundir.logs import find_attempts
from launcher.rundir.owner import ElsewhereError, is_alive
from launcher.rundir.queued import Queued, find_queued
from launcher.rundir.record import (
    RecordedOutcome,
    RecordedRun,
    RunRecord,
    last_written,
    parse_end,
    read_record,
)
from worker_entry.protocol.frozen import asdict, dataclass, replace

LAST_BYTES = 2 << 10
"""Bytes read at the end of events.jsonl for a run that is over: the last events are enough."""
END_BYTES = 64 << 10
"""Bytes read if the last event is longer than that."""
Progress = tuple[int | None, int | None]
"""Epoch and step."""
ATTEMPT_BYTES = 256 << 10
"""Bytes of events.jsonl that are read."""
ANSWER_S = 0.2
"""How long a controller may take to report its tasks' progress before the journal is used instead."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The summary of one run. Unknown values are None or empty."""

    name: str
    """The name of the run's folder, which commands accept as RUN."""
    run_id: str
    """The run's original name; a copy of the folder keeps it."""
    directory: str
    """The path of the run's folder."""
    state: RunState
    reference: str
    """Why the run failed: the class of the failure, or the reference of another error."""
    running: bool
    """Whether the controller is alive, or is elsewhere and has recorded no end."""
    controller: str
    """Where the controller is, if this machine cannot see its process: `on gpu-a`."""
    started: float
    """Unix seconds."""
    ended: float | None
    """Unix seconds; for a lost run, the time of the controller's last write."""
    exit_status: int | None
    """distlaunch's own exit status; 3 for a lost run."""
    restarts: int
    """Starts of the whole cluster after the first."""
    tasks: int | None
    """The number of tasks in the plan; None once the run is over."""
    tasks_up: int | None
    """The number of tasks that run now."""
    epoch: int | None
    """The furthest epoch that a task has reported."""
    step: int | None
    """The furthest step that a task has reported."""

    def as_json(self) -> dict[str, Any]:
        """The fields, as commands print them with --json."""
        return asdict(self)

    @property
    def shown_state(self) -> str:
        """`running on gpu-a`, `failed (stalled)`."""
        reason = f" ({self.reference})" if self.state == "failed" and self.reference else ""
        return f"{self.state}{reason} {self.controller}".rstrip()

    @property
    def shown_step(self) -> str:
        """`epoch 3, step 120`."""
        parts = [
            f"{what} {value:,}" for what, value in (("epoch", self.epoch), ("step", self.step)) if value is not None
        ]
        return ", ".join(parts)


def summarize(files: RunDir) -> RunSummary:
    """Summarizes a run.

    Raises:
        RunDirectoryError: the folder is not a run's folder.
    """
    record = read_record(files)
    if (queued := find_queued(record)) is not None:
        return _summarize_waiting(files, record, queued)
    place = find_controller(files, record)
    if place is not None:
        return _summarize_running(files, record, place)
    # The controller may have recorded its end and exited after the record was read.
    return _summarize_ended(files, record if record.ended else read_record(files))


def find_controller(files: RunDir, record: RunRecord) -> str | None:
    """Where the run's controller is: `on gpu-a`, or empty if this machine can see it; None if the run is over."""
    if record.ended:
        return None
    try:
        return "" if is_alive(record.controller) and _is_its_folder(files, record) else None
    except ElsewhereError as error:
        return error.place


def _summarize_running(files: RunDir, record: RunRecord, place: str) -> RunSummary:
    facts = live_facts(files, record)
    return RunSummary(
        name=files.root.name,
        run_id=record.run_id,
        directory=str(files.root),
        state=facts.state,
        reference="",
        running=True,
        controller=place,
        started=record.started,
        ended=None,
        exit_status=None,
        restarts=max(0, facts.attempt - 1),
        tasks=facts.tasks,
        tasks_up=facts.tasks_up,
        epoch=facts.epoch,
        step=facts.step,
    )


def _summarize_waiting(files: RunDir, record: RunRecord, queued: Queued) -> RunSummary:
    attempt = max(find_attempts(files), default=0)
    return RunSummary(
        name=files.root.name,
        run_id=record.run_id,
        directory=str(files.root),
        state="pending",
        reference="",
        running=True,
        controller=f"in Slurm's queue: {queued.reason}",
        started=record.started,
        ended=None,
        exit_status=None,
        restarts=max(0, attempt - 1),
        tasks=None,
        tasks_up=None,
        epoch=None,
        step=None,
    )


def _summarize_ended(files: RunDir, record: RunRecord) -> RunSummary:
    end, attempts = _find_end(files, record)
    state: RunState = "ended" if record.ended else "lost"
    for outcome in get_args(Outcome):
        state = outcome if end.outcome == outcome else state
    return RunSummary(
        name=files.root.name,
        run_id=record.run_id,
        directory=str(files.root),
        state=state,
        reference=end.reference if state == "failed" else "",
        running=False,
        controller="",
        started=record.started,
        ended=end.time if end.time is not None else last_written(files),
        exit_status=EXIT_INFRASTRUCTURE if state == "lost" else end.exit_status,
        restarts=max(0, attempts - 1),
        tasks=None,
        tasks_up=None,
        epoch=None,
        step=None,
    )


def _find_end(files: RunDir, record: RunRecord) -> tuple[RecordedOutcome, int]:
    """The run's end and the number of its last attempt; an empty end and 0 if they are not recorded.

    The end is written to run.json, the journal and the report; on a full disk, only one of them may have it. The
    journal and the report of a resumed run have the ends of its earlier starts.
    """
    run = RecordedRun(files)
    lines = run.read_journal(LAST_BYTES)[0] or run.read_journal(END_BYTES)[0]
    attempts = lines[-1].attempt if lines else 0
    if record.end.outcome:
        return record.end, attempts
    for line in reversed(lines):
        if line.kind == "ended":
            return parse_end(line.facts, line.time), attempts
        if line.kind == "run-started":
            break
    report = run.report
    verdict, tries = report.get("verdict"), report.get("attempts")
    reference = verdict.get("reference") if isinstance(verdict, dict) else ""
    end = parse_end({**report, "reference": reference}, report.get("ended"))
    if end.time is None or (record.generation > 0 and end.time < record.started):
        return record.end, attempts
    last = tries[-1] if isinstance(tries, list) and tries else {}
    return end, max(attempts, _read_attempt(last) if isinstance(last, dict) else 0)


def _read_attempt(facts: Mapping[str, Any]) -> int:
    number = facts.get("attempt")
    return number if isinstance(number, int) else 0


def _is_its_folder(files: RunDir, record: RunRecord) -> bool:
    """Whether the controller writes to this folder: a copy of a running run's folder is not running."""
    if not record.directory:
        return True
    try:
        return files.root.samefile(record.directory)
    except OSError:  # the folder was moved, together with the controller's files
        return True


@dataclass(frozen=True, kw_only=True)
class LiveFacts:
    """The known facts about a run's current attempt."""

    state: LiveState = "running"
    attempt: int = 0
    tasks: int | None = None
    tasks_up: int | None = None
    epoch: int | None = None
    step: int | None = None


def live_facts(files: RunPaths, record: RunRecord) -> LiveFacts:
    """Returns the current attempt's facts from the journal, and its steps from the controller if it answers in time."""
    facts = replay(RecordedRun(files).read_journal(ATTEMPT_BYTES)[0], _count_tasks(files))
    epoch, step = _ask_progress(record)
    return facts if epoch is None and step is None else replace(facts, epoch=epoch, step=step)


def replay(lines: Iterable[Line], tasks: int | None) -> LiveFacts:
    """Returns the facts that follow from a journal's last lines; earlier ones are unknown."""
    state: LiveState = "running"
    attempt = 0
    progress: dict[str, Progress] = {}
    up: set[str] | None = None
    for line in lines:
        kind, task = line.kind, line.facts.get("task")
        if kind == "run-started" or line.attempt > attempt > 0:
            up, progress = set(), {}
        if kind == "run-started":
            state = "connecting"
        attempt = line.attempt
        if attempt == 0 and up is None:
            up = set()
        if kind == "state" and line.facts.get("state") in get_args(LiveState):
            state = line.facts["state"]
        if not isinstance(task, str):
            continue
        if up is not None and kind == "task-started":
            up.add(task)
        elif up is not None and kind == "task-exited":
            up.discard(task)
        elif kind == "task-reported":
            progress[task] = _read_progress(line.facts.get("progress"))
    epoch, step = _furthest(progress.values())
    return LiveFacts(
        state=state,
        attempt=attempt,
        tasks=tasks,
        tasks_up=None if up is None else len(up),
        epoch=epoch,
        step=step,
    )


def _ask_progress(record: RunRecord) -> Progress:
    if not record.socket:
        return None, None
    # Imported here: this loads the protocol's messages, which a list of ended runs does not need.
    from launcher.rundir.control import AskStatus, RefusedError, ask

    try:
        answer, connection = ask(record.socket, record.controller.pid, AskStatus(), ANSWER_S)
        connection.close()
        return _furthest(map(_read_progress, json.loads(answer)["tasks"]))
    except (OSError, RefusedError, ValueError, KeyError, TypeError):
        return None, None


def _read_progress(facts: object) -> Progress:
    """Epoch and step as a task reported them; before its first step, `first_step` is null."""
    if not isinstance(facts, dict):
        return None, None
    epoch, step = facts.get("epoch"), facts.get("step")
    has_stepped = facts.get("first_step", 0) is not None
    return (
        epoch if isinstance(epoch, int) else None,
        step if isinstance(step, int) and has_stepped else None,
    )


def _furthest(progress: Iterable[Progress]) -> Progress:
    return max(progress, key=lambda each: [-1 if value is None else value for value in each], default=(None, None))


def _count_tasks(files: RunPaths) -> int | None:
    return len(RecordedRun(files).plan.tasks) or None
