"""What a run's folder says of the run without a question to its controller: run.json, and the end of events.jsonl.

The folder may be another user's, copied, half-written or no run's at all: nothing that is read here is trusted to be
whole, and no file is read that is not a regular one or is larger than expected.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import RunDirectoryError
from launcher.plan.paths import RunPaths
from launcher.run.controller import Controller, parse_controller
from launcher.run.journal_reading import open_regular
from worker_entry.protocol.frozen import dataclass

RECORD_LIMIT = 1 << 20
REPORT_LIMIT = 64 << 20


@dataclass(frozen=True, kw_only=True)
class RecordedEnd:
    """How a run ended, as run.json, events.jsonl and report.json have it; None or empty for what they leave out."""

    outcome: str
    reference: str
    exit_status: int | None
    time: float | None
    """Unix seconds."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of run.json.

    `directory`: where the controller writes; this is another folder if the run's was copied or moved. `started`: Unix
    seconds. `generation`: how many controllers the run has had before. `socket`: the path of the controller's. `ended`:
    whether an end is recorded; `end`: what is recorded of it. `cwd`: where the run was started, empty if that is not
    recorded. `checks`: whether its nodes are checked. `command`: what was typed, without secrets; empty if that is not
    recorded. `job`: the Slurm job that it belongs to; empty if it belongs to none. `waits`: whether it
    waits for that job to begin.
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
    """Reads run.json; without a time of the start in it, this is when the file was written.

    Raises:
        RunDirectoryError: this is not a run's folder.
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
            job=str(facts.get("job") or ""),
            waits=bool(facts.get("waits", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise RunDirectoryError(f"{files.root} is not a run's folder") from None


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
    """The content of report.json; empty if there is none that can be read."""
    try:
        report = json.loads(read_limited(files.report, REPORT_LIMIT)[0])
    except (OSError, ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


def last_written(files: RunPaths) -> float:
    """When the run's controller last wrote its record or an event, in Unix seconds; 0 if it has written neither."""
    written = 0.0
    for path in (files.run, files.events):
        with contextlib.suppress(OSError):
            written = max(written, path.stat().st_mtime)
    return written


def read_limited(path: Path, limit: int) -> tuple[bytes, float]:
    """The file's content, and when it was written.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        ValueError: it is longer than `limit` bytes.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"{path} is too long")
        return content, os.fstat(descriptor).st_mtime
