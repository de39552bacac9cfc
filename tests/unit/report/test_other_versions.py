"""The status that a controller of another version of distlaunch reports."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from launcher.report.status_report import NodeState, RunStatus, TaskState
from tests.harness.builders.statuses import make_status

TASKS = [TaskState(task=f"worker:{index}", node="gpu-a", state="training", metrics={}, gpus=[]) for index in (0, 1)]
STATUS = make_status(*TASKS, nodes=[NodeState(node="gpu-a", cores=2, memory=1, memory_total=2, gpus=[])])


@pytest.fixture
def facts() -> dict[str, Any]:
    return STATUS.model_dump(mode="json")


def test_fields_that_only_another_version_knows_are_ignored_at_any_depth(facts: dict[str, Any]) -> None:
    facts["mood"] = "good"
    facts["tasks"][1] |= {"mood": "better", "colour": {"task": "worker:0"}}
    facts["nodes"][0]["mood"] = ["best"]

    assert RunStatus.read(facts) == STATUS


@pytest.mark.parametrize("more", [{}, {"mood": "good"}])
def test_a_part_without_a_needed_field_is_refused(facts: dict[str, Any], more: dict[str, Any]) -> None:
    del facts["tasks"][0]["node"]

    with pytest.raises(ValidationError, match="node"):
        RunStatus.read({**facts, **more})


@pytest.mark.parametrize("other", [None, [], "running", [{"run_id": "x"}]])
def test_something_else_than_a_part_is_refused(other: object) -> None:
    with pytest.raises(ValidationError):
        RunStatus.read(other)
