"""Every file in `cluster_specs/` has a golden plan, and TensorFlow reads the plan's TF_CONFIGs as intended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.making import make_plan
from launcher.plan.rendering import render_json
from launcher.plan.resources import NodeFacts
from launcher.spec.models import ClusterSpec
from tests.harness.builders.golden_plans import GOLDEN, SPECS, load_example


def plan_as_json(spec: ClusterSpec) -> dict[str, Any]:
    """The plan for nodes with 8 cores and 4 GPUs each."""
    facts = {node.host: NodeFacts(cores=8, gpus=("0", "1", "2", "3")) for node in spec.nodes}
    plan = make_plan(spec, directory="/home/me/project", environ={}, python="/usr/bin/python3", facts=facts)
    return render_json(plan)


@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
def test_the_plan_of_an_example_spec_matches_its_golden_plan(file: Path) -> None:
    """After an intended change, run this test with UPDATE_GOLDEN=1, and review the difference."""
    golden = GOLDEN / f"{file.stem}.json"
    actual = plan_as_json(load_example(file))
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(json.dumps(actual, indent=2) + "\n", encoding="utf-8")

    assert actual == json.loads(golden.read_text(encoding="utf-8"))


def test_every_golden_plan_belongs_to_an_example_spec() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == {file.stem for file in SPECS}
    assert {"one_host", "two_nodes", "chief_and_workers", "with_evaluator"} <= {file.stem for file in SPECS}
