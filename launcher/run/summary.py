"""What a run is at now, as far as its folder tells."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from launcher.errors import EXIT_INFRASTRUCTURE
from launcher.run.control import AskStatus, RefusedError, ask
from launcher.run.controller import ElsewhereError, is_alive
from launcher.run.directory import RunDir
from launcher.run.record import (
    RecordedEnd,
    RunRecord,
    last_written,
    parse_end,
    read_last_events,
    read_record,
    read_report,
)

LiveState = Literal["connecting", "forming", "running", "restarting", "stopping"]
Outcome = Literal["succeeded", "failed", "interrupted"]
RunState = Literal[LiveState, Outcome, "lost", "ended"]
"""`lost`: the controller is gone and has not recorded an end. `ended`: nobody recorded how."""

ATTEMPT_BYTES = 256 << 10
"""How much of events.jsonl is read for a run that is running."""
Progress = tuple[int | None, int | None]
"""Epoch and step."""

ANSWER_S = 0.2
"""How long a controller may take to say how far its tasks are; then the journal has to do."""
END_BYTES = 8 << 10
"""The same for one that is not: the last event is enough."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run. What is not known is None, or an empty text."""

    name: str
    """The name of its folder, which commands take as RUN."""
    run_id: str
    """The name that the run was given; a copy of a run's folder has the same."""
    directory: str
    """The folder."""
    state: RunState
    reference: str
    """Why it failed: the class of the failure, or the reference of another error."""
    running: bool
    """Whether its controller is alive, or is elsewhere and has recorded no end."""
    controller: str
    """Where its controller is, if that cannot be seen from here: `on gpu-a`."""
    started: float
    """Unix seconds."""
    ended: float | None
    """Unix seconds; of a lost run, when its controller last wrote something."""
    exit_status: int | None
    """distlaunch's own exit status; 3 for a lost run."""
    restarts: int
    """Starts of the whole cluster after the first."""
    tasks: int | None
    """The tasks of its plan; None once it is over."""
    tasks_up: int | None
    """How many of them run now."""
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


@dataclass(frozen=True, kw_only=True)
class LiveFacts:
    """What is known of a run's current attempt."""

    state: LiveState = "running"
    attempt: int = 0
    tasks: int | None = None
    tasks_up: int | None = None
    epoch: int | None = None
    step: int | None = None


def summarize(files: RunDir) -> RunSummary:
    """Looks at a run.

    Raises:
        RunDirectoryError: this is not a run's folder.
    """
    record = read_record(files)
    place = find_controller(files, record)
    if place is not None:
        return _summarize_running(files, record, place)
    # The controller may have recorded its end and exited after the record was read.
    return _summarize_ended(files, record if record.ended else read_record(files))


def find_controller(files: RunDir, record: RunRecord) -> str | None:
    """Where the run's controller is: `on gpu-a`, or empty if it can be seen from here; None if the run is over."""
    if record.ended:
        return None
    try:
        return "" if is_alive(record.controller) and _is_its_folder(files, record) else None
    except ElsewhereError as error:
        return error.place


def live_facts(files: RunDir, record: RunRecord) -> LiveFacts:
    """What the journal tells of the current attempt, and the controller of its steps if it answers at once."""
    facts = replay(read_last_events(files, ATTEMPT_BYTES), _count_tasks(files))
    epoch, step = _ask_progress(record)
    return facts if epoch is None and step is None else replace(facts, epoch=epoch, step=step)


def replay(events: list[Mapping[str, Any]], tasks: int | None) -> LiveFacts:
    """The facts that follow from a journal's last events. What began before them is not known."""
    state: LiveState = "running"
    attempt = 0
    progress: dict[str, Progress] = {}
    up: set[str] | None = None
    for event in events:
        kind, number, task = event.get("event"), event.get("attempt"), event.get("task")
        if kind == "run-started" or (isinstance(number, int) and number > attempt > 0):
            up, progress = set(), {}
        if kind == "run-started":
            state = "connecting"
        if isinstance(number, int):
            attempt = number
            if number == 0 and up is None:
                up = set()
        if kind == "state" and event.get("state") in get_args(LiveState):
            state = event["state"]
        if not isinstance(task, str):
            continue
        if up is not None and kind == "task-started":
            up.add(task)
        elif up is not None and kind == "task-exited":
            up.discard(task)
        elif kind == "task-reported":
            progress[task] = _read_progress(event.get("progress"))
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


def _summarize_ended(files: RunDir, record: RunRecord) -> RunSummary:
    events = read_last_events(files, END_BYTES)
    facts = replay(events, None)
    end, attempts = _find_end(files, record, events)
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
        restarts=max(0, attempts - 1, facts.attempt - 1),
        tasks=None,
        tasks_up=None,
        epoch=facts.epoch,
        step=facts.step,
    )


def _find_end(files: RunDir, record: RunRecord, events: list[Mapping[str, Any]]) -> tuple[RecordedEnd, int]:
    """How the run ended, and the number of its last attempt; an empty end and 0 if that is not recorded.

    It is in run.json, the journal and the report; a full disk may have let only one of them through. A run that was
    resumed has the ends of its earlier starts in its journal and its report.
    """
    if record.end.outcome:
        return record.end, 0
    for event in reversed(events):
        if event.get("event") == "ended":
            return parse_end(event, event.get("time")), 0
        if event.get("event") == "run-started":
            break
    report = read_report(files)
    verdict, attempts = report.get("verdict"), report.get("attempts")
    reference = verdict.get("reference") if isinstance(verdict, dict) else ""
    end = parse_end({**report, "reference": reference}, report.get("ended"))
    if end.time is None or (record.generation > 0 and end.time < record.started):
        return record.end, 0
    last = attempts[-1] if isinstance(attempts, list) and attempts else None
    number = last.get("attempt") if isinstance(last, dict) else None
    return end, number if isinstance(number, int) else 0


def _is_its_folder(files: RunDir, record: RunRecord) -> bool:
    """Whether the controller writes to this folder: a copy of a running run's folder is not running."""
    if not record.directory:
        return True
    try:
        return files.root.samefile(record.directory)
    except OSError:  # the folder was moved, and the controller's files with it
        return True


def _count_tasks(files: RunDir) -> int | None:
    try:
        return len(json.loads(files.plan.read_bytes())["tasks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
