"""TF_CONFIG for clusters of every shape: what TensorFlow needs, and nothing that it misreads."""

from __future__ import annotations

import ipaddress
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import TfConfigTooLongError
from launcher.plan.making import make_plan
from launcher.plan.tf_config import LIMIT, TfConfig, check_lengths, format_address, make_tf_configs, render
from launcher.spec.models import ClusterSpec
from launcher.tasks import TaskId
from tests.harness.builders.specs import clusters, specs


def written(addresses: dict[TaskId, str]) -> dict[TaskId, TfConfig]:
    """The TF_CONFIGs of a cluster, without those that are unset."""
    return {task: config for task, config in make_tf_configs(addresses).items() if config is not None}


@given(clusters())
def test_tf_config_uses_only_job_names_that_tensorflow_knows(addresses: dict[TaskId, str]) -> None:
    for config in written(addresses).values():
        assert set(config["cluster"]) <= {"chief", "worker", "ps", "evaluator"}
        assert config["task"]["type"] in config["cluster"]
        assert all(config["cluster"].values()), "a job without tasks is a job too many"


@given(clusters())
def test_tf_config_is_unset_exactly_in_a_run_of_one_task(addresses: dict[TaskId, str]) -> None:
    configs = make_tf_configs(addresses)

    assert configs.keys() == addresses.keys()
    assert {config is None for config in configs.values()} == {len(addresses) == 1}


@given(clusters())
def test_only_the_evaluator_has_the_evaluator_in_its_tf_config(addresses: dict[TaskId, str]) -> None:
    for task, config in written(addresses).items():
        assert ("evaluator" in config["cluster"]) == (task.type == "evaluator")


@given(clusters())
def test_all_tasks_have_the_same_cluster_in_tf_config_apart_from_the_evaluator(
    addresses: dict[TaskId, str],
) -> None:
    seen = {
        json.dumps({job: tasks for job, tasks in config["cluster"].items() if job != "evaluator"}, sort_keys=True)
        for config in written(addresses).values()
    }

    assert len(seen) <= 1


@given(clusters())
def test_every_task_finds_its_own_address_in_tf_config(addresses: dict[TaskId, str]) -> None:
    for task, config in written(addresses).items():
        assert config["task"] == {"type": task.type, "index": task.index}
        assert config["cluster"][task.type][task.index] == addresses[task]


@given(clusters())
def test_tf_config_lists_every_visible_task_once(addresses: dict[TaskId, str]) -> None:
    for task, config in written(addresses).items():
        listed = [address for tasks in config["cluster"].values() for address in tasks]
        visible = [a for other, a in addresses.items() if other.type != "evaluator" or task.type == "evaluator"]
        assert sorted(listed) == sorted(visible)


@given(clusters())
def test_tf_config_survives_a_json_round_trip(addresses: dict[TaskId, str]) -> None:
    for config in written(addresses).values():
        assert json.loads(json.dumps(config)) == config


@given(specs())
def test_the_task_environment_has_the_complete_tf_config_or_none(spec: ClusterSpec) -> None:
    environ = dict.fromkeys(spec.env_from, "value")
    tasks = make_plan(spec, directory="/work", environ=environ, python="python").tasks

    for task in tasks:
        if len(tasks) == 1:
            assert "TF_CONFIG" not in task.whole_env
        else:
            assert json.loads(task.whole_env["TF_CONFIG"]) == task.tf_config
            assert task.tf_config is not None


@given(specs())
def test_all_addresses_of_a_plan_are_distinct_and_parseable(spec: ClusterSpec) -> None:
    environ = dict.fromkeys(spec.env_from, "value")
    tasks = make_plan(spec, directory="/work", environ=environ, python="python").tasks
    addresses = {
        address for task in tasks if task.tf_config for a in task.tf_config["cluster"].values() for address in a
    }

    assert len(addresses) in (0, len(tasks))
    for address in addresses:
        host, _, port = address.rpartition(":")
        assert 1 <= int(port) <= 65535
        assert "@" not in host
        assert "://" not in host
        if ":" in host:
            assert (host[0], host[-1]) == ("[", "]")
            assert ipaddress.ip_address(host[1:-1]).version == 6


@given(st.ip_addresses(v=6), st.integers(1, 65535))
def test_ipv6_addresses_get_brackets_once(address: ipaddress.IPv6Address, port: int) -> None:
    assert format_address(str(address), port) == format_address(f"[{address}]", port) == f"[{address}]:{port}"


@given(st.ip_addresses(v=4).map(str) | st.sampled_from(["gpu-a", "gpu-a.example.org"]), st.integers(1, 65535))
def test_host_names_and_ipv4_addresses_are_formatted_without_brackets(host: str, port: int) -> None:
    assert format_address(host, port) == f"{host}:{port}"


def test_a_tf_config_that_fills_a_variable_is_allowed_and_a_longer_one_is_not() -> None:
    addresses = {TaskId("worker", number): f"10.0.{number >> 8}.{number & 255}:20500" for number in range(5000)}
    addresses |= {TaskId("ps", number): f"ps{number}:20500" for number in range(1000)}
    first, last = TaskId("worker", 0), TaskId("worker", 4999)
    config = make_tf_configs(addresses)[last]
    assert config is not None

    addresses[first] = "h" * (len(addresses[first]) + LIMIT - len(render(config)))
    check_lengths(make_tf_configs(addresses))
    addresses[first] += "h"
    with pytest.raises(TfConfigTooLongError, match=f"of 6,000 tasks has {LIMIT + 1:,} bytes"):
        check_lengths(make_tf_configs(addresses))


def test_ten_thousand_tasks_are_refused_before_the_start_unless_their_framework_has_no_tf_config() -> None:
    nodes = [{"host": f"gpu{number}"} for number in range(10_000)]

    def plan(**fields: str) -> int:
        spec = ClusterSpec.model_validate({"nodes": nodes, "program": {"script": "train.py"}, **fields})
        return len(make_plan(spec, directory="/work", environ={}, python="python").tasks)

    with pytest.raises(TfConfigTooLongError) as raised:
        plan()
    assert raised.value.hint.startswith("let the cluster have at most 8,")
    assert plan(framework="torch") == plan(framework="jax") == len(nodes)
