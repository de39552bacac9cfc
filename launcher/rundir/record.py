"""Reads the record of a run from its folder, without asking its controller.

The folder may belong to another user or be a copy, half-written, or not a run's folder at all. Therefore, the code
trusts no content to be complete, and reads only regular files of limited size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import RunDirectoryError
from launcher.plan.paths import RunPaths
from launcher.report.journal_line import Line
from launcher.rundir.journal_reading import PIECE, JournalReader, open_regular, read_last_lines
from launcher.rundir.owner import Controller, parse_controller
from launcher.tasks import TaskId, parse_task_id
from worker_entry.protocol.frozen import dataclass

if TYPE_CHECKING:
    from launcher.report.run_events import Record
    from launcher.spec.models import ClusterSpec

FORMAT = 2
"""The format of a run's folder, which run.json names; those of later versions are refused.

0: run.json names no format. 1: messages in events.jsonl are of the kind `said`, and `connection` in spec.json is `way`.
"""
RECORD_LIMIT = 1 << 20
FILE_LIMIT = 64 << 20
"""Bytes of the longest plan, spec or report that is read."""
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class RecordedOutcome:
    """The end of a run as recorded in run.json, events.jsonl or report.json; missing values are None or empty."""

    outcome: str
    reference: str
    exit_status: int | None
    time: float | None
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of run.json.

    `name`: the name of the cluster.
    `directory`: the folder to which the controller writes, which differs if the run's folder was copied or moved.
    `started`: Unix seconds. `generation`: the number of earlier controllers. `socket`: the path of the controller's
    control socket. `ended`: whether an end is recorded; `end`: the recorded end. `cwd`: the folder where the run was
    started. `checks`: whether the run checks its nodes. `command`: the command line as typed, without secrets. `job`:
    the run's Slurm job, if any. `waits`: whether the run waits for this job to start. Texts are empty if not recorded.
    """

    run_id: str
    name: str
    controller: Controller
    ended: bool
    directory: str
    started: float
    generation: int
    socket: str
    end: RecordedOutcome
    cwd: str
    checks: bool
    command: str
    job: str
    waits: bool


@dataclass(frozen=True)
class RecordedTask:
    """A task of plan.json."""

    task: TaskId
    node: str
    address: str


@dataclass(frozen=True)
class RecordedPlan:
    """The content of plan.json, and the parts that all readers need; empty if the file cannot be read."""

    content: Mapping[str, Any]
    tasks: Sequence[RecordedTask]
    strategy: str


@dataclass(frozen=True)
class RecordedRun:
    """A run, as the files of its folder describe it. Each property reads its file: a controller may be writing it."""

    files: RunPaths

    @property
    def record(self) -> RunRecord:
        """The content of run.json; if it has no start time, the file's modification time stands in.

        Raises:
            RunDirectoryError: the folder is not a run's folder, or that of a later version.
        """
        try:
            content, written = read_limited(self.files.run, RECORD_LIMIT)
            return _parse_record(self.files, json.loads(content), written)
        except _UNREADABLE:
            raise RunDirectoryError(f"{self.files.root} is not a run's folder") from None

    @property
    def plan(self) -> RecordedPlan:
        """The plan of the last attempt."""
        content = read_object(self.files.plan)
        try:
            tasks = [
                RecordedTask(parse_task_id(each["task"]), str(each.get("node") or ""), str(each.get("address") or ""))
                for each in content["tasks"]
            ]
        except _UNREADABLE:
            return RecordedPlan(content, (), "")
        return RecordedPlan(content, tasks, str(content.get("strategy") or ""))

    @property
    def spec(self) -> str:
        """The spec as JSON, without secrets.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        try:
            return read_limited(self.files.spec, FILE_LIMIT)[0].decode()
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"cannot read {self.files.spec}: {error}") from None

    @property
    def spec_fields(self) -> dict[str, Any]:
        """The fields of the spec by their present names, without secrets.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        try:
            fields = _rename_fields(json.loads(self.spec))
        except (ValueError, RecursionError) as error:
            raise RunDirectoryError(f"cannot read {self.files.spec}: {error}") from None
        if not isinstance(fields, dict):
            raise RunDirectoryError(f"cannot read {self.files.spec}: not an object")
        return fields

    def parse_spec(self) -> ClusterSpec:
        """The spec; values that are secrets are hidden.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        from launcher.spec.models import ClusterSpec  # commands that only read the record need no models

        try:
            return ClusterSpec.model_validate_json(json.dumps(self.spec_fields))
        except ValueError as error:
            raise RunDirectoryError(f"cannot read {self.files.spec}: {error}") from None

    @property
    def report(self) -> Mapping[str, Any]:
        """The content of report.json; empty if it cannot be read."""
        return read_object(self.files.report)

    def read_journal(self, size: int = PIECE) -> tuple[list[Line], JournalReader]:
        """Returns the lines in the last `size` bytes of events.jsonl, and a reader for later lines."""
        return read_last_lines(self.files.events, size)

    def read_records(self) -> Iterator[Record]:
        """Yields all events of the journal, complete, in order; ignores torn lines and unknown kinds."""
        from launcher.report.run_events import parse_records  # commands that only read messages need no models

        try:
            lines = self.files.events.read_bytes().splitlines()
        except OSError:
            return
        yield from parse_records(lines)


def read_record(files: RunPaths) -> RunRecord:
    """The record of the run; see `RecordedRun.record`."""
    return RecordedRun(files).record


def _parse_record(files: RunPaths, facts: Mapping[str, Any], written: float) -> RunRecord:
    if (number := int(facts.get("format") or 0)) > FORMAT:
        raise RunDirectoryError(
            f"{files.root} is the folder of a later version of distlaunch (format {number})", hint="update distlaunch"
        )
    return RunRecord(
        run_id=str(facts["run_id"]),
        name=str(facts.get("name") or facts["run_id"]),
        controller=parse_controller(facts["controller"]),
        ended=bool(facts["ended"]),
        directory=str(facts.get("directory") or ""),
        started=float(facts.get("started") or written),
        generation=int(facts.get("generation") or 0),
        socket=str(facts.get("socket") or ""),
        end=parse_end(facts, facts.get("ended_at")),
        cwd=str(facts.get("cwd") or ""),
        checks=bool(facts.get("checks", False)),
        command=str(facts.get("command") or ""),
        job=_job(facts.get("job")),
        waits=bool(facts.get("waits", False)),
    )


def _rename_fields(part: object) -> object:
    """Gives the fields of a spec of format 1, or of its nodes, their present names."""
    if isinstance(part, list):
        return [_rename_fields(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {
        "connection" if name == "way" else name: _rename_fields(value) if name in ("nodes", "known") else value
        for name, value in part.items()
    }


def read_object(path: Path, limit: int = FILE_LIMIT) -> Mapping[str, Any]:
    """The file's JSON object; empty if there is none, or if the file is longer than `limit` bytes."""
    try:
        found = json.loads(read_limited(path, limit)[0])
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _job(value: object) -> str:
    """The id of a Slurm job; any other text is ignored, because the id becomes an argument of Slurm's programs."""
    text = str(value or "")
    return text if re.fullmatch(r"[0-9]+(_[0-9]+)?(\+[0-9]+)?", text, re.ASCII) else ""


def parse_end(facts: Mapping[str, Any], time: object) -> RecordedOutcome:
    """The end from its JSON object."""
    outcome, reference, status = (facts.get(key) for key in ("outcome", "reference", "exit_status"))
    return RecordedOutcome(
        outcome=outcome if isinstance(outcome, str) else "",
        reference=reference if isinstance(reference, str) else "",
        exit_status=status if isinstance(status, int) else None,
        time=float(time) if isinstance(time, (int, float)) else None,
    )


def last_written(files: RunPaths) -> float:
    """When the run's controller last wrote run.json or an event, in Unix seconds; 0 if neither file exists."""
    written = 0.0
    for path in (files.run, files.events):
        with contextlib.suppress(OSError):
            written = max(written, path.stat().st_mtime)
    return written


def read_limited(path: Path, limit: int) -> tuple[bytes, float]:
    """Returns the file's content and modification time.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file is longer than `limit` bytes.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"{path} is too long")
        return content, os.fstat(descriptor).st_mtime
