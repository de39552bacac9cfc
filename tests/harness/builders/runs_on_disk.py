"""Folders of runs as a controller writes them, without a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.rundir.directory import RunDir
from launcher.rundir.owner import this_process

GONE: Mapping[str, Any] = {"pid": 1 << 22, "started": 1.0}
"""A dead controller: Linux assigns no pid as high as this."""


def write_run(
    folder: Path,
    *,
    controller: Mapping[str, Any] | None = None,
    outcome: str | None = None,
    reference: str = "",
    exit_status: int = 0,
    started: float | None = None,
    ended_at: float | None = None,
    generation: int = 0,
    tasks: int = 1,
) -> RunDir:
    """A run controlled by this process, unless `controller` says otherwise; with an outcome, the run has ended."""
    files = RunDir.create(folder)
    now = time.time()
    facts: dict[str, Any] = {
        "run_id": folder.name,
        "name": "test",
        "directory": str(folder),
        "controller": {**asdict(this_process()), **(controller or {})},
        "ended": outcome is not None,
        "started": now if started is None else started,
        "generation": generation,
    }
    if outcome:
        end = {"outcome": outcome, "reference": reference or outcome, "exit_status": exit_status}
        facts |= {**end, "ended_at": now if ended_at is None else ended_at}
    files.write_json(files.run, facts)
    files.write_json(files.plan, {"tasks": [{"task": f"worker:{index}"} for index in range(tasks)]})
    return files


def append_events(files: RunDir, *events: Mapping[str, Any]) -> None:
    with files.events.open("a") as file:
        file.writelines(json.dumps({"time": 1.0, **event}) + "\n" for event in events)
