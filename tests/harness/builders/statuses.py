"""The status of a running run, as its controller reports it."""

from __future__ import annotations

from launcher.report.status_report import RunStatus, TaskState


def make_status(*tasks: TaskState, **changes: object) -> RunStatus:
    """The status of a run with these tasks; `changes`: other fields."""
    facts: dict[str, object] = {
        "run_id": "r-1",
        "name": "mnist",
        "directory": "/runs/r-1",
        "state": "running",
        "attempt": 1,
        "restarts": 0,
        "started": 0.0,
        "now": 200.0,
        "tasks": tasks,
        "nodes": [],
        **changes,
    }
    return RunStatus.model_validate(facts)
