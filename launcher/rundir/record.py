"""Reads the record of a run from its folder, without asking its controller: run.json and report.json.

The folder may belong to another user or be a copy, half-written, or not a run's folder at all. Therefore, the code
trusts no content to be complete, and reads only regular files of limited size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RunDirectoryError
from launcher.plan.paths import RunPaths
from launcher.rundir.journal_reading import open_regular
from launcher.rundir.owner import Controller, parse_controller
from worker_entry.protocol.frozen import dataclass

RECORD_LIMIT = 1 << 20
REPORT_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class RecordedEnd:
    """The end of a run as recorded in run.json, events.jsonl or report.json; missing values are None or empty."""

    outcome: str
    reference: str
    exit_status: int | None
    time: float | None
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of run.json.

    `directory`: the folder to which the controller writes, which differs if the run's folder was copied or moved.
    `started`: Unix seconds. `generation`: the number of earlier controllers. `socket`: the path of the controller's
    control socket. `ended`: whether an end is recorded; `end`: the recorded end. `cwd`: the folder where the run was
    started. `checks`: whether the run checks its nodes. `command`: the command line as typed, without secrets. `job`:
    the run's Slurm job, if any. `waits`: whether the run waits for this job to start. Texts are empty if not recorded.
    """

    run_id: str
    controller: Controller
    ended: bool
    directory: str
    started: float
    generation: int
    socket: str
    end: RecordedEnd
    cwd: str
    checks: bool
    command: str
    job: str
    waits: bool


def read_record(files: RunPaths) -> RunRecord:
    """Reads run.json; if it has no start time, the file's modification time stands in.

    Raises:
        RunDirectoryError: the folder is not a run's folder.
    """
    try:
        content, written = read_limited(files.run, RECORD_LIMIT)
        facts = json.loads(content)
        return RunRecord(
            run_id=str(facts["run_id"]),
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise RunDirectoryError(f"{files.root} is not a run's folder") from None


def _job(value: object) -> str:
    """The id of a Slurm job; it becomes an argument of Slurm's programs, so nothing else is taken for one."""
    text = str(value or "")
    return text if re.fullmatch(r"[0-9]+(_[0-9]+)?(\+[0-9]+)?", text, re.ASCII) else ""


def parse_end(facts: Mapping[str, Any], time: object) -> RecordedEnd:
    """The end from its JSON object."""
    outcome, reference, status = (facts.get(key) for key in ("outcome", "reference", "exit_status"))
    return RecordedEnd(
        outcome=outcome if isinstance(outcome, str) else "",
        reference=reference if isinstance(reference, str) else "",
        exit_status=status if isinstance(status, int) else None,
        time=float(time) if isinstance(time, (int, float)) else None,
    )


def read_report(files: RunPaths) -> Mapping[str, Any]:
    """The content of report.json; empty if it cannot be read."""
    try:
        report = json.loads(read_limited(files.report, REPORT_LIMIT)[0])
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


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
