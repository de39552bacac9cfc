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
def test_few_nodes_dial_all_nodes(count: int) -> None:
    assert choose_dials(names(count), "n0") == {node: names(count) for node in names(count)}


@given(st.integers(ALL_PAIRS + 1, 1500), st.data())
def test_each_of_many_is_dialled_by_the_leader_and_by_as_many_others(count: int, data: st.DataObject) -> None:
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
def test_without_a_leader_each_dials_some(count: int) -> None:
    chosen = choose_dials(names(count), None)
    assert {len(others) for others in chosen.values()} == {count_partners(count)}


def test_a_node_that_one_of_its_callers_does_not_reach_is_found_among_many() -> None:
    spec = spec_of(*({"host": name} for name in names(100)), checkpoint_directory=CHECKPOINTS)

    answered = Answered(spec, failures={("n3", "n7"): "timed-out"})

    [finding] = answered.findings
    assert finding.message == "n3 cannot reach worker:7 on n7 at n7:20007: no answer"
    lines = render_findings(answered.report())
    assert lines[0] == (
        "883 of 884 dials from the leader and 7 other nodes to each task's address, and from all to the leader's "
        "were answered"
    )


def test_a_folder_that_one_node_of_many_does_not_see_is_found() -> None:
    spec = spec_of(*({"host": name} for name in names(100)), checkpoint_directory=CHECKPOINTS)

    answered = Answered(spec, sees={"n5": ["n5"]})

    [finding] = answered.findings
    assert (finding.node, finding.reference) == ("n5", "checkpoint-not-shared")


@pytest.mark.parametrize(("count", "callers"), [(ALL_PAIRS, []), (ALL_PAIRS + 1, ["10.1.0.7"])])
def test_nodes_not_dialled_by_all_others_learn_which_addresses_call_them(count: int, callers: list[str]) -> None:
    answered = Answered(spec_of(*({"host": name} for name in names(count))), source="10.1.0.7")
    assert answered.preflight.find_callers() == callers
