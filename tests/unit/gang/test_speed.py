"""The speed check without a machine: which node or link is slow, which node measures when, and what the report says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.gang.checks.findings import SpeedReport
from launcher.gang.checks.speed import (
    LATENCY_FLOOR_S,
    MOST_ROUNDS,
    TIMES,
    LinkFigures,
    NodeFigures,
    Pair,
    SpeedCheck,
    Subject,
    find_slow_links,
    find_slow_nodes,
)
from launcher.report.check_text import make_speed_tables
from worker_entry.protocol.speed import LinkMeasured, MeasureLink, MeasureNode, NodeMeasured
from worker_entry.protocol.values import Target

TENSORFLOW = "TensorFlow on CPU"
FAST, SLOW = 100.0, 10.0


def slow_nodes(*speeds: float) -> list[str]:
    """The names of the slow nodes among a, b, … that multiply at these speeds."""
    nodes = {name: NodeFigures(speed, 10.0) for name, speed in zip("abcdefgh", speeds, strict=False)}
    return [str(slow.subject) for slow in find_slow_nodes(nodes, dict.fromkeys(nodes, TENSORFLOW))]


def slow_links(*known: str, **speeds: float) -> list[str | Pair]:
    """The slow nodes and links, given links named by their two nodes (`ab=10`); `known`: nodes known to be slow."""
    links = {(name[0], name[1]): LinkFigures(speed, speed, 10_000) for name, speed in speeds.items()}
    return [slow.subject for slow in find_slow_links(links, known)]


# --- nodes ---


def test_a_slow_node_is_found_among_two_or_more_nodes() -> None:
    assert slow_nodes(FAST, SLOW) == ["b"]
    assert slow_nodes(FAST, FAST, SLOW) == ["c"]
    assert slow_nodes(SLOW, FAST, FAST, FAST, 70.0, FAST) == ["a", "e"]


def test_equally_slow_nodes_and_small_differences_are_not_reported() -> None:
    assert slow_nodes(SLOW) == slow_nodes(SLOW, SLOW) == slow_nodes(SLOW, SLOW, SLOW) == []
    assert slow_nodes(100.0, 93.0, 81.0, 104.0) == []


def test_a_node_with_slow_memory_copies_is_reported_for_memory() -> None:
    nodes = {"a": NodeFigures(FAST, 10.0), "b": NodeFigures(FAST, 4.0), "c": NodeFigures(FAST, 10.0)}
    [slow] = find_slow_nodes(nodes, dict.fromkeys(nodes, TENSORFLOW))
    assert (slow.subject, slow.quantity, slow.figure, slow.median, slow.share) == ("b", "memory", 4.0, 10.0, 0.4)


def test_node_speeds_are_compared_only_within_the_same_method() -> None:
    nodes = {name: NodeFigures(speed, 10.0) for name, speed in (("a", 9000.0), ("b", 9000.0), ("c", FAST), ("d", SLOW))}
    methods = {"a": "TensorFlow on GPU", "b": "TensorFlow on GPU", "c": TENSORFLOW, "d": TENSORFLOW}
    assert [slow.subject for slow in find_slow_nodes(nodes, methods)] == ["d"]


# --- links ---


def test_a_slow_link_is_distinguished_from_a_node_with_a_slow_network() -> None:
    assert slow_links(ab=SLOW, bc=FAST, ca=FAST) == [("a", "b")]
    assert slow_links(ab=SLOW, bc=SLOW, ca=FAST) == ["b"]
    assert slow_links(ab=FAST, bc=SLOW, cd=FAST, da=FAST) == [("b", "c")]
    assert slow_links(ab=FAST, bc=SLOW, cd=SLOW, da=FAST) == ["c"]
    assert slow_links(ab=FAST, bc=SLOW, cd=SLOW, de=FAST, ef=SLOW, fa=FAST) == ["c", ("e", "f")]


def test_equally_slow_links_and_small_differences_are_not_reported() -> None:
    assert slow_links(ab=SLOW, bc=SLOW, ca=SLOW) == []
    assert slow_links(ab=100.0, bc=90.0, cd=81.0, da=112.0) == []
    assert slow_links() == []


def test_slow_links_of_a_slow_node_are_not_reported_separately() -> None:
    assert slow_links("b", ab=SLOW) == []
    assert slow_links("b", ab=SLOW, bc=SLOW, ca=FAST) == []
    assert slow_links("b", ab=SLOW, bc=SLOW, cd=FAST, de=SLOW, ea=FAST) == [("d", "e")]


def test_a_slow_link_of_a_slow_node_with_a_fast_link_is_reported() -> None:
    assert slow_links("b", ab=SLOW, bc=FAST, ca=FAST) == [("a", "b")]
    assert slow_links("a", "b", ab=SLOW, bc=FAST, ca=FAST) == [("a", "b")]


def test_the_two_directions_of_a_single_link_are_compared() -> None:
    assert slow_links(ab=SLOW) == []
    for there, back in ((FAST, SLOW), (SLOW, FAST)):
        [slow] = find_slow_links({("a", "b"): LinkFigures(there, back, 10_000)})
        assert (slow.subject, slow.figure) == (("a", "b"), SLOW)


def test_high_latency_is_reported_but_differences_below_half_a_millisecond_are_not() -> None:
    def far(**latencies: float) -> list[tuple[str | Pair, str]]:
        links = {(name[0], name[1]): LinkFigures(FAST, FAST, 1 / latency) for name, latency in latencies.items()}
        return [(slow.subject, slow.quantity) for slow in find_slow_links(links)]

    assert far(ab=0.00005, bc=0.0005, ca=0.0001) == []
    assert far(ab=0.00005, bc=0.02, ca=0.0001) == [(("b", "c"), "latency")]
    assert far(ab=0.02, bc=0.02, cd=0.0001, da=0.0001) == [("b", "latency")]


# --- which node measures when ---


def subject(number: int, *, machine: str = "", methods: Sequence[str] = ("tensorflow", "python")) -> Subject:
    name = f"gpu-{number}"
    target = Target(f"worker:{number}", f"10.0.0.{number}", 20000)
    return Subject(
        node=name, machine=machine or name, methods=methods, env={"A": "1", "TF_CONFIG": "{}"}, target=target
    )


class World:
    """Nodes that answer their orders, in random order."""

    def __init__(self, subjects: Sequence[Subject], seed: int = 0, **options: Any) -> None:
        self.subjects = {one.node: one for one in subjects}
        self.nodes = {one.node: FAST for one in subjects}
        self.links: dict[frozenset[str], float] = {}
        self.changing: dict[str, Iterator[float]] = {}
        """Successive measurements of a node, if they differ."""
        self.changing_links: dict[frozenset[str], Iterator[LinkMeasured]] = {}
        self.methods: dict[str, str] = {}
        self.problems: dict[str, str] = {}
        self.link_problems: dict[frozenset[str], str] = {}
        self.noise = 0.0
        self.lost: set[str] = set()
        self.orders: list[tuple[str, MeasureNode | MeasureLink]] = []
        self.ended = 0.0
        self._random = random.Random(seed)
        self.check = SpeedCheck(subjects, prefers_torch=False, nonce="5f3a", started=0.0, **options)

    def run(self) -> SpeedReport:
        waiting: dict[str, MeasureNode | MeasureLink] = {}
        for now in range(10_000):
            there = self.subjects.keys() - self.lost
            for node, order in self.check.take_orders(there, float(now)):
                assert node not in waiting
                assert node in there
                waiting[node] = order
                self.orders.append((node, order))
            waiting = {node: order for node, order in waiting.items() if node in there}
            self._check_that_nothing_disturbs(waiting)
            if self.check.is_over:
                self.ended = float(now)
                assert not waiting
                return self.check.make_report()
            assert waiting
            node = self._random.choice(sorted(waiting))
            self.check.note(node, self._answer(node, waiting.pop(node)))
        raise AssertionError("it does not end")

    def peer(self, order: MeasureLink) -> str:
        return f"gpu-{order.target.task.partition(':')[2]}"

    def _check_that_nothing_disturbs(self, waiting: Mapping[str, MeasureNode | MeasureLink]) -> None:
        uses = [
            {
                self.subjects[name].machine
                for name in (node, self.peer(order) if isinstance(order, MeasureLink) else node)
            }
            for node, order in waiting.items()
            if isinstance(order, MeasureLink) or not order.only_starts
        ]
        assert all(not one & other for one, other in combinations(uses, 2))

    def _answer(self, node: str, order: MeasureNode | MeasureLink) -> NodeMeasured | LinkMeasured:
        factor = 1 - self._random.random() * self.noise
        if isinstance(order, MeasureNode):
            speed = self.nodes[node] if order.only_starts else next(self.changing.get(node, repeat(self.nodes[node])))
            method = self.methods.get(node, TENSORFLOW)
            return NodeMeasured(method, speed * factor, 10.0, self.problems.get(node, ""))
        link = frozenset({node, self.peer(order)})
        if link in self.changing_links:
            return next(self.changing_links[link])
        speed = self.links.get(link, FAST) * factor
        return LinkMeasured(speed, speed, 0.0001, self.link_problems.get(link, ""))


def messages(report: SpeedReport) -> list[str]:
    return [finding.message for finding in report.findings]


@given(st.integers(2, 9), st.integers(1, 9), st.integers(0, 1000))
def test_speed_measurements_never_share_a_machine_and_give_each_node_two_partners(
    count: int, machines: int, seed: int
) -> None:
    world = World([subject(number, machine=f"machine-{number % machines}") for number in range(count)], seed)
    report = world.run()
    assert report.findings == []
    assert [node.node for node in report.nodes] == sorted(world.nodes)
    partners: dict[str, set[str]] = {name: set() for name in world.nodes}
    for link in report.links:
        partners[link.node].add(link.to)
        partners[link.to].add(link.node)
    assert {len(found) for found in partners.values()} == {1 if count == 2 else 2}
    assert len(report.links) == (1 if count == 2 else count)
    links = sum(isinstance(order, MeasureLink) for _, order in world.orders)
    assert len(world.orders) - links == count * (1 + TIMES)  # a start, and the rounds
    assert links == len(report.links) * TIMES


def test_a_slow_node_and_a_slow_link_are_reported_with_figures() -> None:
    world = World([subject(number) for number in range(5)])
    world.nodes["gpu-1"] = 31.0
    world.links[frozenset({"gpu-3", "gpu-4"})] = SLOW
    report = world.run()
    assert messages(report) == [
        "gpu-1 is slow: matrix product 31 GFLOP/s, 0.31 × the median of 100 GFLOP/s",
        "the link between gpu-3 and gpu-4 is slow: network 10 MB/s, 0.10 × the median of 100 MB/s",
    ]
    assert [(finding.reference, finding.level, finding.node) for finding in report.findings] == [
        ("slow-node", "warning", "gpu-1"),
        ("slow-link", "warning", "gpu-3"),
    ]


def test_a_slow_link_between_two_nodes_is_reported_as_possibly_a_slow_node() -> None:
    links = SpeedCheck([subject(0), subject(1)], prefers_torch=False, nonce="", started=0.0)
    for _ in range(100):
        for node, order in [*links.take_orders({"gpu-0", "gpu-1"}, 1.0)]:
            measured = isinstance(order, MeasureNode)
            links.note(node, NodeMeasured(TENSORFLOW, FAST, FAST) if measured else LinkMeasured(FAST, SLOW, 1))
    [message] = messages(links.make_report())
    slow = "network 10 MB/s, 0.18 × the median of 55 MB/s, from gpu-1 to gpu-0"
    either = "with two nodes to compare, one of them may be slow"
    assert message == f"the link between gpu-0 and gpu-1 is slow: {slow}; {either}"


def test_a_moderately_slow_node_is_reported_only_if_its_best_figure_repeats() -> None:
    for steady, named in ((True, ["gpu-2"]), (False, [])):
        world = World([subject(number) for number in range(4)])
        figures = iter([20.0, 30.0, 40.0, 45.0, 50.0, 55.0, 61.0, 68.0] if not steady else [68.0] * 8)
        world.changing["gpu-2"] = figures
        assert [finding.node for finding in world.run().findings] == named


@pytest.mark.parametrize("slow", ["throughput", "latency"])
def test_a_moderately_slow_link_is_reported_only_if_its_best_figure_repeats(slow: str) -> None:
    growing = [20.0, 30.0, 40.0, 45.0, 50.0, 55.0, 61.0, 68.0]
    for steady, named in ((True, ["gpu-1"]), (False, [])):
        world = World([subject(number) for number in range(4)])
        figures = [68.0] * len(growing) if steady else growing
        answers = [
            LinkMeasured(f, f, 0.0001) if slow == "throughput" else LinkMeasured(FAST, FAST, LATENCY_FLOOR_S * FAST / f)
            for f in figures
        ]
        world.changing_links[frozenset({"gpu-1", "gpu-2"})] = iter(answers)
        assert [finding.node for finding in world.run().findings] == named


def test_a_link_that_cannot_be_measured_is_named() -> None:
    world = World([subject(number) for number in range(3)])
    world.link_problems[frozenset({"gpu-0", "gpu-1"})] = "connection refused"
    report = world.run()
    assert [(link.node, link.to) for link in report.links] == [("gpu-1", "gpu-2"), ("gpu-2", "gpu-0")]
    assert messages(report) == ["the link between gpu-0 and gpu-1 was not measured: connection refused"]
    assert report.findings[0].reference == "speed-unknown"


def test_nodes_that_computed_with_different_methods_are_named() -> None:
    world = World([subject(number) for number in range(3)])
    world.methods["gpu-1"] = "NumPy"
    report = world.run()
    methods = f"gpu-0 with {TENSORFLOW}, gpu-1 with NumPy, gpu-2 with {TENSORFLOW}"
    message = f"the nodes computed with different methods; only those with the same one were compared: {methods}"
    assert [(found.reference, found.node, found.message) for found in report.findings] == [
        ("speed-unknown", "gpu-0", message)
    ]


def test_a_link_without_a_measured_round_trip_has_no_latency() -> None:
    world = World([subject(number) for number in range(3)])
    world.changing_links[frozenset({"gpu-0", "gpu-1"})] = repeat(LinkMeasured(FAST, FAST, 0.0))
    report = world.run()
    assert [link.latency_s for link in report.links] == [0.0, pytest.approx(0.0001), pytest.approx(0.0001)]


def test_an_answer_that_was_not_asked_for_is_ignored() -> None:
    check = SpeedCheck([subject(0), subject(1)], prefers_torch=False, nonce="", started=0.0)
    check.note("gpu-0", NodeMeasured(TENSORFLOW, FAST, FAST))
    assert len([*check.take_orders({"gpu-0", "gpu-1"}, 1.0)]) == 2
    check.note("gpu-0", LinkMeasured(FAST, FAST, 1.0))
    assert [*check.take_orders({"gpu-0", "gpu-1"}, 2.0)] == []
    report = check.make_report()
    assert (report.nodes, report.links) == ([], [])


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_speed_check_takes_more_rounds_and_reports_only_the_slow_node(seed: int) -> None:
    world = World([subject(number) for number in range(4)], seed)
    world.noise = 0.6
    world.nodes["gpu-2"] = 30.0
    assert [finding.node for finding in world.run().findings if finding.reference == "slow-node"] == ["gpu-2"]
    rounds = [order for node, order in world.orders if node == "gpu-0" and isinstance(order, MeasureNode)]
    assert TIMES + 1 < len(rounds) <= MOST_ROUNDS + 1


def test_a_node_that_cannot_be_measured_does_not_prevent_other_measurements() -> None:
    world = World([subject(number) for number in range(3)])
    world.problems["gpu-1"] = "ImportError: no libcudart"
    report = world.run()
    assert [node.node for node in report.nodes] == ["gpu-0", "gpu-2"]
    assert len(report.links) == 3
    assert messages(report) == ["the speed of gpu-1 was not measured: ImportError: no libcudart"]


@given(st.integers(0, 60))
def test_the_speed_check_ends_even_if_a_node_is_lost_at_any_time(when: int) -> None:
    world = World([subject(number) for number in range(4)])
    note, count = world.check.note, 0

    def lose(node: str, message: NodeMeasured | LinkMeasured) -> None:
        nonlocal count
        note(node, message)
        count += 1
        if count == when:
            world.lost.add("gpu-2")

    world.check.note = lose  # type: ignore[method-assign]
    world.run()


def test_all_nodes_use_a_method_that_is_available_on_every_node() -> None:
    def method(*methods: Sequence[str], prefers_torch: bool = False) -> str:
        subjects = [subject(number, methods=found) for number, found in enumerate(methods)]
        check = SpeedCheck(subjects, prefers_torch=prefers_torch, nonce="", started=0.0)
        [found] = {
            order.method
            for _, order in check.take_orders({one.node for one in subjects}, 0.0)
            if isinstance(order, MeasureNode)
        }
        return found

    everything = ("tensorflow", "torch", "numpy", "python")
    assert method(everything, everything) == "tensorflow"
    assert method(everything, everything, prefers_torch=True) == "torch"
    assert method(everything, ("torch", "numpy", "python")) == "numpy"
    assert method(everything, ("python",)) == "python"
    assert method(everything, ()) == "python"


def test_the_speed_check_runs_without_tf_config() -> None:
    world = World([subject(0), subject(1)])
    world.run()
    orders = [order for _, order in world.orders if isinstance(order, MeasureNode)]
    assert {tuple(order.unset) for order in orders} == {("TF_CONFIG",)}
    assert {tuple(order.env) for order in orders} == {("A", "TF_CONFIG")}


def test_the_nodes_of_a_link_prove_themselves_and_the_report_has_the_duration() -> None:
    world = World([subject(0), subject(1)])
    report = world.run()
    assert {order.nonce for _, order in world.orders if isinstance(order, MeasureLink)} == {"5f3a"}
    assert report.seconds == world.ended > 0


def test_speed_figures_are_shown_in_a_node_table_and_a_link_table() -> None:
    world = World([subject(0), subject(1)])
    tables = [(tuple(column.title for column in columns), rows) for columns, rows in make_speed_tables(world.run())]
    assert tables == [
        (
            ("node", "matrix product", "memory copy", "by"),
            [(f"gpu-{number}", "100 GFLOP/s", "10 GB/s", TENSORFLOW) for number in (0, 1)],
        ),
        (("link", "there", "back", "latency"), [("gpu-0 to gpu-1", "100 MB/s", "100 MB/s", "0.1 ms")]),
    ]
    assert [columns[0].title for columns, _ in make_speed_tables(World([subject(0)]).run())] == ["node"]
