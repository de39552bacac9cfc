"""Which nodes dial which: all pairs in a small cluster, a sufficient sample in a large one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gang.checks.preflight import ALL_PAIRS, choose_dials, count_partners
from launcher.report.check_text import render_findings
from tests.harness.builders.preflights import CHECKPOINTS, Answered, spec_of


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


@given(st.integers(1, ALL_PAIRS))
def test_every_node_dials_every_node_in_a_small_cluster(count: int) -> None:
    assert choose_dials(names(count), "n0") == {node: names(count) for node in names(count)}


@given(st.integers(ALL_PAIRS + 1, 1500), st.data())
def test_the_leader_and_a_sample_dial_each_node_of_a_large_cluster(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    leader = data.draw(st.sampled_from(nodes))

    chosen = choose_dials(nodes, leader)

    assert chosen == choose_dials(nodes, leader)
    assert [*chosen] == nodes
    dialled_by: dict[str, set[str]] = {node: set() for node in nodes}
    for node, others in chosen.items():
        assert node not in others
        assert len(set(others)) == len(others)
        for other in others:
            dialled_by[other].add(node)
    assert dialled_by[leader] == {*nodes} - {leader}
    for node in {*nodes} - {leader}:
        assert leader in dialled_by[node]
        assert count_partners(count) <= len(dialled_by[node] | {leader}) <= count_partners(count) + 1
    assert sum(map(len, chosen.values())) <= count * (count_partners(count) + 2)


@given(st.integers(ALL_PAIRS + 1, 500))
def test_without_a_leader_every_node_dials_the_same_number_of_nodes(count: int) -> None:
    chosen = choose_dials(names(count), None)
    assert {len(others) for others in chosen.values()} == {count_partners(count)}


def test_one_failed_dial_among_100_nodes_is_reported() -> None:
    spec = spec_of(*({"host": name} for name in names(100)), checkpoint_directory=CHECKPOINTS)

    answered = Answered(spec, failures={("n3", "n7"): "timed-out"})

    [finding] = answered.findings
    assert finding.message == "n3 cannot reach worker:7 on n7 at n7:20007: no answer"
    lines = render_findings(answered.report())
    assert lines[0] == (
        "883 of 884 dials from the leader and 7 other nodes to each task's address, and from all to the leader's "
        "were answered"
    )


def test_a_checkpoint_folder_not_shared_with_one_of_100_nodes_is_reported() -> None:
    spec = spec_of(*({"host": name} for name in names(100)), checkpoint_directory=CHECKPOINTS)

    answered = Answered(spec, sees={"n5": ["n5"]})

    [finding] = answered.findings
    assert (finding.node, finding.reference) == ("n5", "checkpoint-not-shared")


@pytest.mark.parametrize(("count", "callers"), [(ALL_PAIRS, []), (ALL_PAIRS + 1, ["10.1.0.7"])])
def test_caller_addresses_are_collected_only_if_not_all_pairs_dial(count: int, callers: list[str]) -> None:
    answered = Answered(spec_of(*({"host": name} for name in names(count))), source="10.1.0.7")
    assert answered.preflight.find_callers() == callers
