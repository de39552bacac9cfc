"""Every file in `cluster_specs/` has a golden plan, and TensorFlow reads the plan's TF_CONFIGs as intended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.launch_plan import make_plan
from launcher.plan.rendering import render_json
from launcher.plan.resources import NodeFacts
from launcher.slurm.allocation import Allocation, make_nodes
from launcher.spec.loading import load_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM

COVERS = ("cluster_specs", "launcher/plan", "launcher/spec")

SPECS = sorted((Path(__file__).parents[1] / "cluster_specs").glob("*.yaml"))
GOLDEN = Path(__file__).parent / "golden"

READ_BACK = """
import json, os, sys
import tensorflow as tf
answers = []
for config in json.load(sys.stdin):
    os.environ["TF_CONFIG"] = config
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec()
    answers.append({
        "type": resolver.task_type,
        "id": resolver.task_id,
        "counts": {job: cluster.num_tasks(job) for job in cluster.jobs},
        "own": cluster.task_address(resolver.task_type, resolver.task_id),
    })
print(json.dumps(answers))
"""


def load_example(file: Path) -> ClusterSpec:
    """Loads the spec; if its nodes come from Slurm, it gets those of an example job."""
    spec = load_spec(file)
    if spec.source != SLURM:
        return spec
    return spec.with_nodes(make_nodes(Allocation("12", ("node9", "node10"), (1, 1)), spec))


def plan_as_json(spec: ClusterSpec) -> dict[str, Any]:
    """The plan for nodes with 8 cores and 4 GPUs each."""
    facts = {node.host: NodeFacts(cores=8, gpus=("0", "1", "2", "3")) for node in spec.nodes}
    plan = make_plan(spec, directory="/home/me/project", environ={}, python="/usr/bin/python3", facts=facts)
    return render_json(plan)


@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
def test_the_plan_of_an_example_spec_matches_its_golden_plan(file: Path) -> None:
    """After an intended change, run `UPDATE_GOLDEN=1 pytest tests/test_golden_plans.py` and review the difference."""
    golden = GOLDEN / f"{file.stem}.json"
    actual = plan_as_json(load_example(file))
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(json.dumps(actual, indent=2) + "\n", encoding="utf-8")

    assert actual == json.loads(golden.read_text(encoding="utf-8"))


def test_every_golden_plan_belongs_to_an_example_spec() -> None:
    assert {file.stem for file in GOLDEN.iterdir()} == {file.stem for file in SPECS}
    assert {"one_host", "two_nodes", "chief_and_workers", "with_evaluator"} <= {file.stem for file in SPECS}


@pytest.mark.smoke
@pytest.mark.tensorflow
def test_tensorflow_reads_every_golden_tf_config_as_intended() -> None:
    configs, meant = [], []
    for file in SPECS:
        golden = json.loads((GOLDEN / f"{file.stem}.json").read_text(encoding="utf-8"))
        # The expected values come from the spec, not from the plan.
        spec = load_example(file)
        tasks = [task for _, task in spec.placements()]
        assert len(golden["tasks"]) == len(tasks)
        for task, planned in zip(tasks, golden["tasks"], strict=True):
            if len(tasks) == 1 or spec.framework == "torch":
                assert "TF_CONFIG" not in planned["env"]
                continue
            visible = [other.type for other in tasks if other.type != "evaluator" or task.type == "evaluator"]
            configs.append(planned["env"]["TF_CONFIG"])
            meant.append(
                {
                    "type": task.type,
                    "id": task.index,
                    "counts": {name: visible.count(name) for name in visible},
                    "own": f"{planned['address']}:{planned['port']}",
                }
            )

    done = subprocess.run(
        [sys.executable, "-c", READ_BACK],
        input=json.dumps(configs),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )

    assert json.loads(done.stdout.splitlines()[-1]) == meant
