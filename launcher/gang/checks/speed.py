"""Which node or link is slow, from what was measured of each: pure functions.

A node is compared with the median of all nodes that compute by the same method. A node has links to two others, so that
a slow node and a slow link can be told apart: no link is faster than the slower of its nodes, so a node's network is at
least as fast as its best link.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

SHARE = 0.75
"""What has less than this share of the median is slow."""
LATENCY_FLOOR_S = 0.0005
"""Shorter times count as this one: their differences do not matter to training."""
GAIN = 1.1
"""Measurements that differ by less agree."""

Pair = tuple[str, str]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class NodeFigures:
    """What was measured of a node; both figures grow with speed."""

    gflop_s: float
    memory_gb_s: float

    @property
    def compared(self) -> tuple[float, ...]:
        return self.gflop_s, self.memory_gb_s


@dataclass(frozen=True)
class LinkFigures:
    """What was measured of a link: from the first of its nodes to the second, back, and there and back."""

    there_mb_s: float
    back_mb_s: float
    trips_s: float
    """How often a byte can go there and back in a second."""

    @property
    def compared(self) -> tuple[float, ...]:
        return self.there_mb_s, self.back_mb_s, min(self.trips_s, 1 / LATENCY_FLOOR_S)

    @property
    def mb_s(self) -> float:
        """In the slower direction."""
        return min(self.there_mb_s, self.back_mb_s)

    @property
    def latency_s(self) -> float:
        return 1 / self.trips_s if self.trips_s else 0.0


Figures = TypeVar("Figures", NodeFigures, LinkFigures)


@dataclass(frozen=True)
class Slow:
    """What is slow, and in what: a node in `product`, `memory`, `throughput` or `latency`; a link in the last two."""

    subject: str | Pair
    quantity: str
    figure: float
    median: float
    """What the figure was compared with."""

    @property
    def share(self) -> float:
        """How fast it is compared with the median."""
        inverse = self.quantity == "latency"
        return (self.median / self.figure if inverse else self.figure / self.median) if self.figure else 0.0


_NODE_QUANTITIES: Mapping[str, Callable[[NodeFigures], float]] = {
    "product": lambda node: node.gflop_s,
    "memory": lambda node: node.memory_gb_s,
}
_LINK_QUANTITIES: Mapping[str, Callable[[LinkFigures], float]] = {
    "throughput": lambda link: link.mb_s,
    "latency": lambda link: min(link.trips_s, 1 / LATENCY_FLOOR_S),
}


class Tally(Generic[_Key, Figures]):
    """The best of many measurements, figure by figure: other programs disturb a measurement, and never help it."""

    def __init__(self) -> None:
        self.best: dict[_Key, Figures] = {}
        self.times: dict[_Key, list[int]] = {}
        """How often each of the best figures was reached."""

    def note(self, key: _Key, new: Figures) -> None:
        """Notes one more measurement."""
        before = self.best.setdefault(key, new)
        times = self.times.setdefault(key, [0] * len(new.compared))
        for index, (old, now) in enumerate(zip(before.compared, new.compared, strict=True)):
            if now > GAIN * old:
                times[index] = 1
            elif now >= old / GAIN:
                times[index] += 1
        self.best[key] = type(new)(*map(max, astuple(before), astuple(new)))

    def settled(self, times: int) -> set[_Key]:
        """The keys whose best figures were all reached this often: no accident, and better ones are unlikely."""
        return {key for key, counts in self.times.items() if min(counts) >= times}


def find_slow_nodes(nodes: Mapping[str, NodeFigures], methods: Mapping[str, str]) -> list[Slow]:
    """The nodes that compute or copy slowly; `methods`: with what each computes, and on which kind of device."""
    found = []
    for quantity, figure_of in _NODE_QUANTITIES.items():
        for method in dict.fromkeys(methods[node] for node in nodes):
            values = {name: figure_of(node) for name, node in nodes.items() if methods[name] == method}
            found += [Slow(name, quantity, values[name], median) for name, median in _find_below(values)]
    return sorted(found, key=lambda slow: [*nodes].index(str(slow.subject)))


def find_slow_links(links: Mapping[Pair, LinkFigures], slow_nodes: Collection[str] = ()) -> list[Slow]:
    """The nodes whose network is slow, and the other links that are.

    Args:
        links: what was measured.
        slow_nodes: nodes known to be slow for another reason. Unless its best link is fast, such a node also slows its
            links, which then show nothing.
    """
    found: list[Slow] = []
    for quantity, figure_of in _LINK_QUANTITIES.items():
        values = {pair: figure_of(link) for pair, link in links.items()}
        values = _without(values, {*slow_nodes} - _find_fast(_find_networks(values)))
        networks = _find_networks(values)
        nodes = dict(_find_below(networks))
        found += [_make_slow(node, quantity, networks[node], median) for node, median in nodes.items()]
        rest = _without(values, nodes)
        if len(rest) > 1:
            found += [_make_slow(pair, quantity, rest[pair], median) for pair, median in _find_below(rest)]
        elif quantity == "throughput":  # a single link has only itself to be compared with
            for pair in rest:
                ways = {"there": links[pair].there_mb_s, "back": links[pair].back_mb_s}
                found += [Slow(pair, quantity, ways[way], median) for way, median in _find_below(ways)]
    return found


def _make_slow(subject: str | Pair, quantity: str, value: float, median: float) -> Slow:
    if quantity == "latency":
        return Slow(subject, quantity, 1 / value if value else float("inf"), 1 / median)
    return Slow(subject, quantity, value, median)


def _find_networks(values: Mapping[Pair, float]) -> dict[str, float]:
    """Each node's best link, if it has several: a single link does not show which of its ends is slow."""
    links: dict[str, list[float]] = {}
    for pair, value in values.items():
        for node in pair:
            links.setdefault(node, []).append(value)
    return {node: max(found) for node, found in links.items() if len(found) > 1}


def _without(values: Mapping[Pair, _Value], nodes: Collection[str]) -> dict[Pair, _Value]:
    return {pair: value for pair, value in values.items() if not {*pair} & {*nodes}}


def _find_fast(networks: Mapping[str, float]) -> set[str]:
    return networks.keys() - {node for node, _ in _find_below(networks)}


def _find_below(values: Mapping[_Key, float]) -> Iterator[tuple[_Key, float]]:
    """What has less than its share of the median, with the median."""
    median = statistics.median(values.values()) if values else 0.0
    return ((key, median) for key, value in values.items() if value < SHARE * median)
