"""A spare takes a lost node's place, with its tasks; without one, a smaller cluster goes on if that is allowed."""

from __future__ import annotations

from typing import Any

from launcher.casting import at_first, cast
from launcher.spec import ClusterSpec

A, B, C = {"host": "gpu-a"}, {"host": "gpu-b", "tasks": {"worker": 2}}, {"host": "gpu-c"}
SPARE, SPARE_2 = {"host": "gpu-x", "spare": True}, {"host": "gpu-y", "spare": True}


def spec_of(*nodes: dict[str, Any], **restart: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"nodes": list(nodes), "restart": restart})


def shown(spec: ClusterSpec, *lost: str) -> tuple[dict[str, str], list[str]] | None:
    """Where each task runs, and the notes."""
    chosen = cast(spec, lost)
    if chosen is None:
        return None
    nodes, notes = chosen
    return {str(task): node.host for node, task in nodes.placements()}, notes


def test_a_spare_runs_nothing_at_first() -> None:
    spec = spec_of(A, SPARE, C)
    assert [str(task) for _, task in spec.placements()] == ["worker:0", "worker:1"]
    assert [node.host for node in at_first(spec).nodes] == ["gpu-a", "gpu-c"]
    assert shown(spec) == ({"worker:0": "gpu-a", "worker:1": "gpu-c"}, [])


def test_a_spare_takes_the_place_and_the_tasks_of_the_node_that_was_lost() -> None:
    spec = spec_of(SPARE, A, B, C)
    placed = {"worker:0": "gpu-a", "worker:1": "gpu-x", "worker:2": "gpu-x", "worker:3": "gpu-c"}
    assert shown(spec, "gpu-b") == (placed, ["gpu-x takes the place of gpu-b"])


def test_a_spare_that_is_lost_as_well_is_replaced_by_the_next_one() -> None:
    spec = spec_of(A, C, SPARE, SPARE_2)
    assert shown(spec, "gpu-c", "gpu-x") == (
        {"worker:0": "gpu-a", "worker:1": "gpu-y"},
        ["gpu-y takes the place of gpu-c"],
    )
    assert shown(spec, "gpu-c", "gpu-x", "gpu-y") is None


def test_without_a_spare_a_cluster_ends() -> None:
    assert shown(spec_of(A, B, C), "gpu-b") is None


def test_fewer_workers_go_on_where_that_is_allowed_and_enough_are_left() -> None:
    spec = spec_of(A, B, C, SPARE, min_workers=2)
    assert shown(spec, "gpu-b", "gpu-x") == (
        {"worker:0": "gpu-a", "worker:1": "gpu-c"},
        ["going on without gpu-b", "2 workers of 4 are left"],
    )
    assert shown(spec, "gpu-b", "gpu-x", "gpu-c") is None
    assert shown(spec_of(A, min_workers=1), "gpu-a") is None
