"""The variables by which the processes of JAX find each other and their devices, and which demo they run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.making import make_plan
from launcher.plan.resources import NodeFacts
from launcher.spec.loading import parse_spec
from launcher.spec.models import ClusterSpec


def plan_of(text: str, gpus: Sequence[str] = ("0", "1", "2", "3")) -> LaunchPlan:
    spec = parse_spec(f"framework: jax\n{text}".encode())
    facts = {node.host: NodeFacts(8, tuple(gpus)) for node in spec.nodes}
    return make_plan(spec, directory="/work", environ={}, python="python3", facts=facts)


def test_processes_of_jax_are_numbered_over_all_nodes_and_name_the_first_as_coordinator() -> None:
    plan = plan_of("nodes: [{host: a, address: 10.0.0.1}, {host: b, address: 10.0.0.2, tasks: {worker: 2}}]\n")
    first = f"10.0.0.1:{plan.tasks[0].port}"
    for number, task in enumerate(plan.tasks):
        assert (
            task.env.items()
            >= {
                "JAX_COORDINATOR_ADDRESS": first,
                "JAX_NUM_PROCESSES": "3",
                "JAX_PROCESS_ID": str(number),
                "KERAS_BACKEND": "jax",
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": first,
                "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
                "KERAS_DISTRIBUTION_PROCESS_ID": str(number),
                "DISTLAUNCH_ADDRESS": task.address,
            }.items()
        )
        assert not {"TF_CONFIG", "DISTLAUNCH_STRATEGY"} & task.env.keys()
    assert [task.opens_port for task in plan.tasks] == [True, False, False]


@pytest.mark.parametrize(
    ("node", "visible", "ids"),
    [
        ("tasks: {worker: 2}, gpus: [2, 3]", ["2", "3"], ["0", "0"]),  # numbered from 0 among those that it sees
        ("tasks: {worker: 2}", ["0,1", "2,3"], ["0,1", "0,1"]),
        ("tasks: {worker: 1}", ["0,1,2,3"], ["0,1,2,3"]),
        ("tasks: {worker: 2}, gpus_per_worker: 1", ["0", "1"], ["0", "0"]),
    ],
)
def test_each_process_of_jax_uses_all_gpus_of_its_share(node: str, visible: Sequence[str], ids: Sequence[str]) -> None:
    tasks = plan_of(f"nodes: [{{host: a, {node}}}]\n").tasks
    assert [task.env["CUDA_VISIBLE_DEVICES"] for task in tasks] == visible
    assert [task.env["JAX_LOCAL_DEVICE_IDS"] for task in tasks] == ids


def test_devices_split_the_cpu_of_a_process_of_jax() -> None:
    [task] = plan_of("nodes: [{host: a}]\ndevices: 4\n", gpus=()).tasks
    assert task.env["JAX_NUM_CPU_DEVICES"] == "4"
    assert "JAX_LOCAL_DEVICE_IDS" not in task.env
    [own] = plan_of("nodes: [{host: a}]\ndevices: 4\nenv: {JAX_NUM_CPU_DEVICES: 2}\n", gpus=()).tasks
    assert own.env["JAX_NUM_CPU_DEVICES"] == "2"


def test_a_spec_without_a_program_runs_the_demo_of_its_framework() -> None:
    of_jax = parse_spec(b"nodes: [{host: local}]\nframework: jax\n")
    assert of_jax.program.module == "worker_entry.demo.train_jax"
    assert "program" not in of_jax.model_fields_set  # so that a change of the framework changes the demo
    assert of_jax.changed(framework="tensorflow").program.module == "worker_entry.demo.train"
    assert ClusterSpec.model_validate(of_jax.model_dump(exclude_unset=True)).program == of_jax.program
    assert of_jax.runs_demo


def test_the_program_of_the_spec_stays_when_its_framework_changes() -> None:
    spec = parse_spec(b"nodes: [{host: local}]\nprogram: {module: mine}\n").changed(framework="jax")
    assert (spec.program.module, spec.runs_demo) == ("mine", False)
