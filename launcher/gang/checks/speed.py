"""The speed check: which node measures what and when, and the conclusions. Pure: orders come out, answers go in.

First each node computes and copies, then each link of a ring of all nodes is measured: every node has two links, to
different partners, and the ring follows the numbers of the tasks, as a ring all-reduce does. Nodes that share a machine
are measured one after another, so that no measurement disturbs another; all others are measured at the same time.

Everything is measured in rounds, and the best counts. A node or link takes part until its best figures were reached
twice: if other programs run there, it takes more rounds to find the best figures. If something seems slow, each
figure has to be reached three times; a figure that was not, after eight rounds, may be an accident and names no node,
unless it is below half of the median.

A node is compared with the median of all nodes that compute by the same method. A node has links to two others, so that
a slow node and a slow link can be told apart: no link is faster than the slower of its nodes, so a node's network is at
least as fast as its best link.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from launcher.gang.checks.findings import Finding, LinkSpeed, NodeSpeed, SpeedReport
from worker_entry.protocol import environment
from worker_entry.protocol.speed import METHODS, LinkMeasured, MeasureLink, MeasureNode, NodeMeasured
from worker_entry.protocol.values import Target

TIMES, SLOW_TIMES = 2, 3
"""How often each best figure has to be reached: usually, and if something seems slow."""
MOST_ROUNDS = 8
CLEAR_SHARE = 0.5
_OF_NODES = ("product", "memory")
SHARE = 0.75
"""A figure below this share of the median is slow."""
LATENCY_FLOOR_S = 0.0005
"""Shorter latencies count as this one: their differences do not matter to training."""
GAIN = 1.1
"""Measurements that differ by less agree."""
Pair = tuple[str, str]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A node to measure.

    `machine`: equal for nodes on the same machine. `methods`: the methods that can compute there. `env`: the
    environment of the node's first computing task. `target`: where its partner dials the node, if others dial it.
    """

    node: str
    machine: str
    methods: Collection[str]
    env: Mapping[str, str]
    target: Target | None


@dataclass(frozen=True)
class _Step:
    """One measurement: the node that does it, the order, the node on the other end, and the machines in use."""

    node: str
    order: MeasureNode | MeasureLink
    to: str = ""
    machines: frozenset[str] = frozenset()


class SpeedCheck:
    """One check of these nodes.

    Args:
        subjects: the nodes, in the order of the spec.
        prefers_torch: whether the program trains with PyTorch.
        nonce: proves to the nodes who calls them.
        started: monotonic seconds.
    """

    def __init__(self, subjects: Sequence[Subject], *, prefers_torch: bool, nonce: str, started: float) -> None:
        self._subjects = {subject.node: subject for subject in subjects}
        self._pairs = _make_ring([subject.node for subject in subjects if subject.target is not None])
        self._nonce = nonce
        self._started = self._ended = started
        self._method = _choose_method(subjects, prefers_torch=prefers_torch)
        self._queue: list[_Step] = []
        self._running: dict[str, _Step] = {}
        self._nodes = Tally[str, NodeFigures]()
        self._methods: dict[str, str] = {}
        self._links = Tally[Pair, LinkFigures]()
        self._problems: dict[tuple[str, str], str] = {}
        """Why a measurement failed, by node and the node that it dialled."""
        self._lost: set[str] = set()
        self._stages = self._make_stages()
        self.is_over = False

    def take_orders(self, awaited: Collection[str], now: float) -> Iterator[tuple[str, MeasureNode | MeasureLink]]:
        """The orders that can be sent now; `awaited`: the nodes that are not lost."""
        self._lost |= self._subjects.keys() - awaited
        self._queue = [step for step in self._queue if not {step.node, step.to} & self._lost]
        # A node whose partner is lost reports that, and counts as at work until then.
        self._running = {node: step for node, step in self._running.items() if node not in self._lost}
        while not self.is_over and not self._queue and not self._running:
            steps = next(self._stages, None)
            self.is_over, self._ended = steps is None, now
            self._queue = [step for step in steps or () if not {step.node, step.to} & self._lost]
        busy = {machine for step in self._running.values() for machine in step.machines}
        for step in [*self._queue]:
            if step.node not in self._running and not step.machines & busy:
                busy |= step.machines
                self._queue.remove(step)
                self._running[step.node] = step
                yield step.node, step.order

    def note(self, node: str, message: NodeMeasured | LinkMeasured) -> None:
        """Notes an answer; ignores an unrequested one."""
        step = self._running.get(node)
        if step is None or isinstance(message, NodeMeasured) != isinstance(step.order, MeasureNode):
            return
        del self._running[node]
        if message.problem:
            self._problems[node, step.to] = message.problem
        elif isinstance(message, LinkMeasured):
            trips_s = 1 / message.latency_s if message.latency_s else 0.0
            self._links.note((node, step.to), LinkFigures(message.there_mb_s, message.back_mb_s, trips_s))
        elif isinstance(step.order, MeasureNode) and not step.order.only_starts:
            self._nodes.note(node, NodeFigures(message.gflop_s, message.memory_gb_s))
            self._methods[node] = message.method

    def make_report(self) -> SpeedReport:
        """The report with the measurements and the findings."""
        return SpeedReport(
            nodes=[
                NodeSpeed(node=node, method=self._methods[node], gflop_s=best.gflop_s, memory_gb_s=best.memory_gb_s)
                for node, best in self._best_nodes().items()
            ],
            links=[
                LinkSpeed(
                    node=node,
                    to=to,
                    there_mb_s=best.there_mb_s,
                    back_mb_s=best.back_mb_s,
                    latency_s=best.latency_s,
                )
                for (node, to), best in self._best_links().items()
            ],
            findings=[*self._render_slow(), *self._render_problems()],
            seconds=self._ended - self._started,
        )

    # --- measurements ---

    def _make_stages(self) -> Iterator[list[_Step]]:
        """Groups of steps, each in any order, until nothing seems slow, or the slow figures are certain."""
        yield [self._step(node, only_starts=True) for node in self._subjects]
        for _ in range(MOST_ROUNDS):
            yield [*self._make_node_steps(self._nodes.settled(SLOW_TIMES if self._slow_nodes() else TIMES))]
        for _ in range(MOST_ROUNDS):
            yield [*self._make_link_steps(self._links.settled(SLOW_TIMES if self._slow_links() else TIMES))]

    def _make_node_steps(self, settled: Collection[str]) -> Iterator[_Step]:
        return (self._step(node) for node in self._subjects if (node, "") not in self._problems and node not in settled)

    def _step(self, node: str, *, only_starts: bool = False) -> _Step:
        subject = self._subjects[node]
        order = MeasureNode(self._method, dict(subject.env), [environment.TF_CONFIG], only_starts)
        return _Step(node, order, machines=frozenset() if only_starts else frozenset({subject.machine}))

    def _make_link_steps(self, settled: Collection[Pair]) -> Iterator[_Step]:
        for pair in (*self._pairs[::2], *self._pairs[1::2]):  # first links that share no node with each other
            here, there = (self._subjects[node] for node in pair)
            if pair not in self._problems and pair not in settled and there.target is not None:
                machines = frozenset({here.machine, there.machine})
                yield _Step(here.node, MeasureLink(there.target, self._nonce), there.node, machines)

    def _slow_nodes(self) -> list[Slow]:
        return find_slow_nodes(self._best_nodes(), self._methods)

    def _slow_links(self) -> list[Slow]:
        return find_slow_links(self._best_links(), {str(slow.subject) for slow in self._slow_nodes()})

    def _best_nodes(self) -> dict[str, NodeFigures]:
        return {node: self._nodes.best[node] for node in self._subjects if node in self._nodes.best}

    def _best_links(self) -> dict[Pair, LinkFigures]:
        return {pair: self._links.best[pair] for pair in self._pairs if pair in self._links.best}

    def _is_sure(self, slow: Slow) -> bool:
        """Whether the slowness is no accident: its figures were reached often, or are far from those of others."""
        if slow.share < CLEAR_SHARE:
            return True
        if slow.quantity in _OF_NODES:
            return self._nodes.times[str(slow.subject)][_OF_NODES.index(slow.quantity)] >= SLOW_TIMES
        for pair, link in self._links.best.items():
            if slow.subject == pair or slow.subject in pair:
                index = 2 if slow.quantity == "latency" else link.compared.index(link.mb_s)
                if self._links.times[pair][index] < SLOW_TIMES:
                    return False
        return True

    # --- conclusions ---

    def _render_slow(self) -> Iterator[Finding]:
        slow = [one for one in (*self._slow_nodes(), *self._slow_links()) if self._is_sure(one)]
        for subject in dict.fromkeys(one.subject for one in slow):
            what = ", ".join(_render_figure(one) for one in slow if one.subject == subject)
            if isinstance(subject, str):
                yield _warn("slow-node", subject, f"{subject} is slow: {what}")
            else:
                link = self._links.best[subject]
                way = subject if link.there_mb_s <= link.back_mb_s else subject[::-1]
                alone = "; with two nodes to compare, one of them may be slow" if len(self._links.best) == 1 else ""
                in_throughput = any(one.quantity == "throughput" for one in slow if one.subject == subject)
                slower = f", from {' to '.join(way)}" if in_throughput and link.there_mb_s != link.back_mb_s else ""
                message = f"the link between {' and '.join(subject)} is slow: {what}{slower}{alone}"
                yield _warn("slow-link", subject[0], message)

    def _render_problems(self) -> Iterator[Finding]:
        for (node, to), problem in self._problems.items():
            what = f"the link between {node} and {to}" if to else f"the speed of {node}"
            yield _warn("speed-unknown", node, f"{what} was not measured: {problem}")
        if len(set(self._methods.values())) > 1:
            measured = [node for node in self._subjects if node in self._methods]
            shown = ", ".join(f"{node} with {self._methods[node]}" for node in measured)
            message = f"the nodes computed with different methods; only those with the same one were compared: {shown}"
            yield _warn("speed-unknown", measured[0], message)


def _make_ring(nodes: Sequence[str]) -> list[Pair]:
    return [*pairwise(nodes)] + ([(nodes[-1], nodes[0])] if len(nodes) > 2 else [])


def _choose_method(subjects: Sequence[Subject], *, prefers_torch: bool) -> str:
    """The first method that all nodes have: figures of different libraries cannot be compared."""
    left_out = "tensorflow" if prefers_torch else "torch"
    return next(
        method
        for method in METHODS
        if method == "python" or (method != left_out and all(method in subject.methods for subject in subjects))
    )


_UNITS = {"product": "{:.3g} GFLOP/s", "memory": "{:.3g} GB/s", "throughput": "{:.3g} MB/s", "latency": "{:.3g} s"}
_NAMES = {"product": "matrix product", "memory": "memory copy", "throughput": "network", "latency": "latency"}


def _render_figure(slow: Slow) -> str:
    figure, median = (_UNITS[slow.quantity].format(value) for value in (slow.figure, slow.median))
    return f"{_NAMES[slow.quantity]} {figure}, {slow.share:.2f} × the median of {median}"


def _warn(reference: str, node: str, message: str) -> Finding:
    return Finding(level="warning", node=node, reference=reference, message=message)


@dataclass(frozen=True)
class NodeFigures:
    """The measured figures of a node; higher is faster."""

    gflop_s: float
    memory_gb_s: float

    @property
    def compared(self) -> tuple[float, ...]:
        return self.gflop_s, self.memory_gb_s


@dataclass(frozen=True)
class LinkFigures:
    """The measured figures of a link: from its first node to the second, back, and round trips."""

    there_mb_s: float
    back_mb_s: float
    trips_s: float
    """Round trips of a byte per second."""

    @property
    def compared(self) -> tuple[float, ...]:
        return self.there_mb_s, self.back_mb_s, min(self.trips_s, 1 / LATENCY_FLOOR_S)

    @property
    def mb_s(self) -> float:
        """The throughput in the slower direction."""
        return min(self.there_mb_s, self.back_mb_s)

    @property
    def latency_s(self) -> float:
        return 1 / self.trips_s if self.trips_s else 0.0


Figures = TypeVar("Figures", NodeFigures, LinkFigures)


@dataclass(frozen=True)
class Slow:
    """A slow figure: of a node, `product`, `memory`, `throughput` or `latency`; of a link, one of the last two."""

    subject: str | Pair
    quantity: str
    figure: float
    median: float
    """The median that the figure was compared with."""

    @property
    def share(self) -> float:
        """The speed as a share of the median speed."""
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
    """The nodes that compute or copy slowly; `methods`: the library and the kind of device of each node."""
    found = []
    for quantity, figure_of in _NODE_QUANTITIES.items():
        for method in dict.fromkeys(methods[node] for node in nodes):
            values = {name: figure_of(node) for name, node in nodes.items() if methods[name] == method}
            found += [Slow(name, quantity, values[name], median) for name, median in _find_below(values)]
    return sorted(found, key=lambda slow: [*nodes].index(str(slow.subject)))


def find_slow_links(links: Mapping[Pair, LinkFigures], slow_nodes: Collection[str] = ()) -> list[Slow]:
    """The nodes whose network is slow, and the slow links between other nodes.

    Args:
        links: the measured figures.
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
    """The keys of values below SHARE of the median, each with the median."""
    median = statistics.median(values.values()) if values else 0.0
    return ((key, median) for key, value in values.items() if value < SHARE * median)
