"""Every file in `cluster_specs/` has a golden plan, and TensorFlow reads the plan's TF_CONFIGs as intended."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.harness.builders.golden_plans import GOLDEN, SPECS, load_example

COVERS = ("cluster_specs", "launcher/plan", "launcher/spec")

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


@pytest.mark.smoke
def test_tensorflow_reads_every_golden_tf_config_as_intended() -> None:
    configs, meant = [], []
    for file in SPECS:
        golden = json.loads((GOLDEN / f"{file.stem}.json").read_text(encoding="utf-8"))
        # The expected values come from the spec, not from the plan.
        spec = load_example(file)
        tasks = [task for _, task in spec.placements()]
        assert len(golden["tasks"]) == len(tasks)
        for task, planned in zip(tasks, golden["tasks"], strict=True):
            if len(tasks) == 1 or spec.framework != "tensorflow":
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
