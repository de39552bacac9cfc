"""A spare takes a lost node's place, with its tasks; without a spare, a smaller cluster continues if allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gang.policy import AttemptPolicy
from launcher.plan.planner import select_nodes, without_spares
from launcher.spec.models import ClusterSpec
from launcher.spec.strategies import find_role_problem
from launcher.tasks import TASK_TYPES

A, B, C = {"host": "gpu-a"}, {"host": "gpu-b", "tasks": {"worker": 2}}, {"host": "gpu-c"}
SPARE, SPARE_2 = {"host": "gpu-x", "spare": True}, {"host": "gpu-y", "spare": True}


def spec_of(*nodes: dict[str, Any], **restart: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"nodes": list(nodes), "restart": restart})


def shown(spec: ClusterSpec, *lost: str) -> tuple[dict[str, str], list[str]] | None:
    """Where each task runs, and the notes."""
    chosen = select_nodes(spec, lost)
    if chosen is None:
        return None
    nodes, notes = chosen
    return {str(task): node.host for node, task in nodes.placements()}, notes


def test_a_spare_runs_no_task_before_a_loss() -> None:
    spec = spec_of(A, SPARE, C)
    assert [str(task) for _, task in spec.placements()] == ["worker:0", "worker:1"]
    assert [node.host for node in without_spares(spec).nodes] == ["gpu-a", "gpu-c"]
    assert shown(spec) == ({"worker:0": "gpu-a", "worker:1": "gpu-c"}, [])


def test_a_spare_takes_over_all_tasks_of_a_lost_node() -> None:
    spec = spec_of(SPARE, A, B, C)
    placed = {"worker:0": "gpu-a", "worker:1": "gpu-x", "worker:2": "gpu-x", "worker:3": "gpu-c"}
    assert shown(spec, "gpu-b") == (placed, ["gpu-x takes the place of gpu-b"])


def test_a_lost_spare_is_replaced_by_the_next_spare() -> None:
    spec = spec_of(A, C, SPARE, SPARE_2)
    assert shown(spec, "gpu-c", "gpu-x") == (
        {"worker:0": "gpu-a", "worker:1": "gpu-y"},
        ["gpu-y takes the place of gpu-c"],
    )
    assert shown(spec, "gpu-c", "gpu-x", "gpu-y") is None


def test_a_cluster_cannot_continue_after_a_loss_without_a_spare() -> None:
    assert shown(spec_of(A, B, C), "gpu-b") is None


def test_a_cluster_continues_with_fewer_workers_down_to_min_workers() -> None:
    spec = spec_of(A, B, C, SPARE, min_workers=2)
    assert shown(spec, "gpu-b", "gpu-x") == (
        {"worker:0": "gpu-a", "worker:1": "gpu-c"},
        ["continuing without gpu-b", "2 of 4 workers are left"],
    )
    assert shown(spec, "gpu-b", "gpu-x", "gpu-c") is None
    assert shown(spec_of(A, min_workers=1), "gpu-a") is None


CHIEF, PS = {"host": "chief", "tasks": {"chief": 1}}, {"host": "ps", "tasks": {"ps": 1}}


class TestRoles:
    """A cluster that continues without a node still fits its strategy."""

    def cluster(self, *more: dict[str, Any], min_workers: int = 1) -> ClusterSpec:
        return ClusterSpec.model_validate(
            {
                "nodes": [CHIEF, PS, A, C, *more],
                "strategy": "parameter_server",
                "restart": {"min_workers": min_workers},
            }
        )

    @pytest.mark.parametrize("host", ["chief", "ps"])
    def test_a_lost_chief_or_server_is_replaced_and_never_left_out(self, host: str) -> None:
        assert shown(self.cluster(), host) is None
        chosen = shown(self.cluster(SPARE), host)
        assert chosen is not None
        assert chosen[1] == [f"gpu-x takes the place of {host}"]

    def test_min_workers_counts_only_workers(self) -> None:
        chosen = shown(self.cluster(), "gpu-a")
        assert chosen is not None
        assert chosen[1] == ["continuing without gpu-a", "1 of 2 workers is left"]
        assert shown(self.cluster(min_workers=2), "gpu-a") is None  # the chief is no worker

    def test_a_spare_replaces_only_a_node_that_it_fits(self) -> None:
        small = {"host": "small", "spare": True, "gpus": ["0"], "gpus_per_worker": 1}
        last = {"host": "last", "spare": True, "port": 65535}
        spec = spec_of(A, B, small, last, SPARE)
        assert shown(spec, "gpu-b") == (
            {"worker:0": "gpu-a", "worker:1": "gpu-x", "worker:2": "gpu-x"},
            ["gpu-x takes the place of gpu-b"],
        )
        assert shown(spec_of(A, B, small, last), "gpu-b") is None
        chosen = shown(spec, "gpu-a")
        assert chosen is not None
        assert chosen[1] == ["small takes the place of gpu-a"]


@st.composite
def clusters_and_losses(draw: st.DrawFn) -> tuple[ClusterSpec, list[str]]:
    """A valid spec of any strategy that has a cluster, and some of its nodes."""
    strategy = draw(st.sampled_from(["multi_worker_mirrored", "parameter_server"]))
    counts = {"chief": draw(st.integers(0, 1)), "worker": draw(st.integers(0, 3)), "ps": 0, "evaluator": 0}
    counts["evaluator"] = draw(st.integers(0, 1))
    if strategy == "parameter_server":
        counts = {**counts, "chief": 1, "worker": max(counts["worker"], 1), "ps": draw(st.integers(1, 2))}
    elif not counts["chief"] + counts["worker"]:
        counts["worker"] = 1
    nodes: list[dict[str, Any]] = [{"host": f"n{number}", "tasks": {}} for number in range(draw(st.integers(1, 5)))]
    for task_type, count in counts.items():
        for _ in range(count):
            tasks = draw(st.sampled_from(nodes))["tasks"]
            tasks[task_type] = tasks.get(task_type, 0) + 1
    nodes = [node for node in nodes if node["tasks"]]
    for number in range(draw(st.integers(0, 2))):
        spare = {"host": f"s{number}", "spare": True, **draw(st.sampled_from([{}, {"port": 65535}]))}
        nodes.insert(draw(st.integers(0, len(nodes))), spare)
    restart = {"min_workers": draw(st.integers(0, counts["worker"]))}
    spec = ClusterSpec.model_validate({"nodes": nodes, "strategy": strategy, "restart": restart})
    return spec, draw(st.lists(st.sampled_from([node.host for node in spec.nodes]), unique=True))


@given(clusters_and_losses())
def test_any_cluster_after_any_loss_is_valid_and_can_succeed(case: tuple[ClusterSpec, list[str]]) -> None:
    spec, lost = case
    chosen = select_nodes(spec, lost)
    if chosen is None:
        assert lost
        return
    left = chosen[0]
    assert ClusterSpec.model_validate(left.model_dump(exclude_unset=True)) == left
    assert not {node.host for node in left.nodes} & {*lost}
    tasks = [task for _, task in left.placements()]
    assert find_role_problem(left.strategy, {name: sum(t.type == name for t in tasks) for name in TASK_TYPES}) is None
    policy = AttemptPolicy({"all": frozenset(tasks)}, frozenset(), 1.0, 1.0, 1.0, strategy=left.rules)
    assert policy.trainers
