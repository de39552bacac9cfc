"""The checks that nodes perform before a start, and the conclusions from their answers.

TensorFlow waits an hour for a peer that it cannot reach, and does not say which one it is; so nodes first dial each
other's tasks, at exactly the addresses and ports of TF_CONFIG; `choose_dials` says which.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from launcher.gang.checks.findings import DialReport, Finding
from launcher.gang.checks.speed import SpeedCheck, Subject
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.making import program_of
from launcher.plan.tf_config import format_address
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from launcher.tasks import LOCAL, TaskId, find_leader
from launcher.wording import render_run
from worker_entry.protocol.advice import advise_install
from worker_entry.protocol.frozen import dataclass, replace
from worker_entry.protocol.messages import Dialled, Inspected, Ready
from worker_entry.protocol.orders import Dial, Inspect
from worker_entry.protocol.speed import LinkMeasured, NodeMeasured
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import DialResult, Target

CLOCK_LIMIT_S = 2.0
"""Clocks further apart get a warning: checkpoints and logs of different nodes no longer sort by time."""
LITTLE_SPACE = 1 << 30
BUSY_SHARE = 0.1
"""Share of a GPU's memory in use above which the GPU counts as busy."""
Answer = Ready | Inspected | Dialled | NodeMeasured | LinkMeasured
"""An answer of a node to the checks."""
ALL_PAIRS = 64
"""Up to this many nodes, each dials all."""


@dataclass(frozen=True)
class Answers:
    """The answers of a node so far."""

    ready: Ready
    clock_offset_s: float = 0.0
    inspected: Inspected | None = None
    dialled: Dialled | None = None


class Preflight:
    """The checks of one start. `nonce` is a word that no other run uses.

    `candidates`: by host, the addresses at which the node's tasks may be reached; by default, those of the spec.
    `examines`: whether nodes report facts about their machines as well.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        nonce: str,
        candidates: Mapping[str, Sequence[str]] | None = None,
        *,
        examines: bool = False,
    ) -> None:
        self.nonce = nonce
        self._examines = examines
        self._candidates = candidates or {node.host: node.candidates for node in spec.nodes}
        self._answers: dict[str, Answers] = {}
        self._complete: set[str] = set()
        """The nodes that have answered everything."""
        self.speed: SpeedCheck | None = None
        """The speed check, which follows the other checks if it is wanted and they have found no error."""
        self._spec = spec
        self._marks = {node.host: f"{nonce}-{number}" for number, node in enumerate(spec.nodes)}
        self._owners = {str(task): node for node, task in spec.placements()}
        self._dialled_nodes: dict[str, list[str]] = {}

    @property
    def answers(self) -> dict[str, Answers]:
        """The answers of the nodes that have answered, in the order of the spec."""
        return {node.host: self._answers[node.host] for node in self._spec.nodes if node.host in self._answers}

    def make_inspect(self, node: str) -> Inspect:
        shared = self._shared
        return Inspect(program_of(self._spec), shared, self._marks[node] if shared else "", self._examines)

    def make_dials(self, nodes: Collection[str], ports: Mapping[TaskId, int]) -> dict[str, Dial]:
        """The dials for each of these nodes: to every candidate address of the tasks that the node has to reach.

        In a cluster of one task, no node dials anything.
        """
        placements = list(self._spec.placements())
        leader = find_leader(task for _, task in placements)
        leading = next((node.host for node, task in placements if task == leader), None)
        chosen = choose_dials([node.host for node in self._spec.nodes if node.host in nodes], leading)
        targets: dict[str, list[Target]] = {node: [] for node in chosen}
        for node, task in placements if len(placements) > 1 else ():
            if task in ports and task.type != "evaluator" and node.host in targets:
                addresses = self._candidates[node.host]
                targets[node.host] += [Target(str(task), address, ports[task]) for address in addresses]
        shared = self._shared
        self._dialled_nodes = chosen
        return {
            node: Dial(
                [target for other in others for target in targets[other]],
                self.nonce,
                shared,
                [self._marks[other] for other in others if other in self._answers] if shared else [],
            )
            for node, others in chosen.items()
        }

    def find_callers(self) -> list[str]:
        """The addresses from which the nodes have dialled, if not each of them has dialled all others."""
        if len(self._answers) <= ALL_PAIRS:
            return []
        return sorted({result.source for _, result in self._results() if result.source})

    def note(self, node: str, message: Answer, clock_offset_s: float) -> None:
        before = self._answers.get(node)
        if isinstance(message, (NodeMeasured, LinkMeasured)):
            if self.speed is not None:
                self.speed.note(node, message)
        elif isinstance(message, Ready):
            self._answers[node] = Answers(message)
            self._complete.discard(node)
        elif before is not None and isinstance(message, Inspected):
            self._answers[node] = replace(before, inspected=message, clock_offset_s=clock_offset_s)
        elif before is not None and isinstance(message, Dialled):
            self._answers[node] = replace(before, dialled=message, clock_offset_s=clock_offset_s)
        after = self._answers.get(node)
        if after is not None and after.inspected is not None and after.dialled is not None:
            self._complete.add(node)

    def is_complete(self, nodes: frozenset[str]) -> bool:
        """Whether all of these nodes have answered everything."""
        return nodes <= self._complete

    # --- conclusions ---

    def choose_addresses(self) -> dict[str, str]:
        """For each node, the first candidate that every node reaches, or else its first candidate."""
        failed = {(r.target.task, r.target.host) for _, r in self._results() if r.failure}
        bad = {(self._owners[task].host, host) for task, host in failed}
        chosen = {}
        for node in self._spec.nodes:
            candidates = self._candidates[node.host]
            good = [host for host in candidates if (node.host, host) not in bad]
            chosen[node.host] = (good or candidates)[0]
        return chosen

    def render_choices(self) -> list[str]:
        """A line for each node that had several addresses to choose from."""
        chosen = self.choose_addresses()
        return [
            f"{n.host} is reached at {chosen[n.host]}" for n in self._spec.nodes if len(self._candidates[n.host]) > 1
        ]

    def dials(self) -> list[DialReport]:
        return [
            DialReport(
                node=node,
                task=result.target.task,
                address=format_address(result.target.host, result.target.port),
                resolved=result.resolved,
                failure=result.failure,
            )
            for node, result in self._results()
        ]

    def findings(self) -> list[Finding]:
        """All errors and warnings; errors first."""
        found = [*self._dial_findings(), *self._differences(), *self._shared_findings()]
        for node, answers in self.answers.items():
            found += _node_findings(node, answers)
        return sorted(found, key=lambda finding: finding.level)

    def _results(self) -> Iterator[tuple[str, DialResult]]:
        for node, answers in self.answers.items():
            for result in answers.dialled.results if answers.dialled is not None else ():
                if result.target.task in self._owners:  # otherwise the agent is broken
                    yield node, result

    def _dial_findings(self) -> Iterator[Finding]:
        chosen = self.choose_addresses()
        for node, result in self._results():
            owner = self._owners[result.target.task]
            if result.failure and result.target.host == chosen[owner.host]:
                message, hint = _explain(node, owner, result, f"{self._spec.ports}")
                hint = self._advise(node, owner, result, hint)
                yield Finding(level="error", node=node, reference="cannot-reach", message=message, hint=hint)

    def _advise(self, node: str, owner: NodeSpec, result: DialResult, hint: str) -> str:
        """The hint with an address or a command, if the nodes' own addresses show which one is needed."""
        own, target = self._own_addresses(owner.host), result.target
        dialled = [address for address in result.resolved or [target.host] if address in own]
        if not own:
            return hint
        if not dialled:
            number = [each.host for each in self._spec.nodes].index(owner.host)
            example = f"--set 'nodes[{number}].address={own[0]}'"
            return f"{hint}; {owner.host} itself has {', '.join(own)}: {example} takes the first"
        is_v6 = ":" in dialled[0]
        callers = [address for address in self._own_addresses(node) if (":" in address) == is_v6]
        if node == owner.host or not callers or result.failure not in _BLOCKED:
            return hint
        spec_ports = self._spec.ports
        is_free = spec_ports.first <= target.port <= spec_ports.last
        ports = f"{spec_ports.first}:{spec_ports.last}" if is_free else f"{target.port}"
        command = (
            f"sudo {'ip6tables' if is_v6 else 'iptables'} -I INPUT -p tcp -s {','.join(callers)} "
            f"--dport {ports} -j ACCEPT"
        )
        blocked = _BLOCKED[result.failure].replace("{ports}", ports.replace(":", "-"))
        others = [address for address in own if address not in dialled]
        rest = f"; or give {owner.host} another `address:` of its own ({', '.join(others)})" if others else ""
        return f"{blocked}; {render_run([owner.host], command)}{rest}"

    def _own_addresses(self, node: str) -> list[str]:
        """The addresses of a node's interfaces at which others may reach it; empty if it has not named them."""
        answers = self._answers.get(node)
        found = answers.inspected.addresses if answers is not None and answers.inspected is not None else []
        return [address for address in found if not address.startswith("fe80:")]  # each link has its own fe80

    def _differences(self) -> Iterator[Finding]:
        inspected = {node: a.inspected for node, a in self.answers.items() if a.inspected is not None}
        ready = {node: answers.ready for node, answers in self.answers.items()}
        pythons = {node: _minor(each.python) for node, each in ready.items()}
        tensorflows = {node: each.tensorflow or _NONE for node, each in ready.items()}
        kerases = {node: each.keras or _NONE for node, each in inspected.items()}
        executables = {node: each.executable for node, each in ready.items()}
        yield from _difference("Python", pythons, "python-differs", _advise_python(pythons))
        yield from _difference(
            "TensorFlow", tensorflows, "tensorflow-differs", _advise_version("tensorflow", tensorflows, executables)
        )
        # A node without Keras gets it with TensorFlow.
        with_keras = {node: version for node, version in kerases.items() if version != _NONE}
        yield from _difference("Keras", kerases, "keras-differs", _advise_version("keras", with_keras, executables))
        yield from self._missing_tensorflow(tensorflows, executables)
        hashes = {node: answers.program_hash[:12] for node, answers in inspected.items() if answers.program_hash}
        if not self._spec.runs_demo and len(set(hashes.values())) > 1:
            yield Finding(
                level="error",
                node=next(iter(hashes)),
                reference="program-differs",
                message=f"the program is not the same on all nodes: {_group(hashes)}",
                hint="copy it to all nodes, or add `sync:` to the spec; --no-check starts it anyway",
            )

    def _missing_tensorflow(self, versions: Mapping[str, str], executables: Mapping[str, str]) -> Iterator[Finding]:
        """A warning if no other machine has TensorFlow; for the demo, each of them reports an error itself."""
        nodes = [node for node in versions if node != LOCAL]
        if (
            nodes
            and {*versions.values()} == {_NONE}
            and self._spec.framework == "tensorflow"
            and self._spec.program.command is None
            and not self._spec.runs_demo
        ):
            yield Finding(
                level="warning",
                node=nodes[0],
                reference="no-tensorflow",
                message=f"TensorFlow is not installed on {', '.join(nodes)}",
                hint=render_run(nodes, advise_install("tensorflow", executables[nodes[0]])),
            )

    @property
    def _shared(self) -> str:
        """The folder that nodes have to share; with `collect`, none, because checkpoints are brought to the nodes."""
        return self._spec.checkpoint_directory or "" if not self._spec.collect else ""

    def _shared_findings(self) -> Iterator[Finding]:
        folder = self._shared
        if not folder:
            return
        seen: dict[str, set[str]] = {}  # only of nodes that left a mark and have not been lost since
        for node, answers in self.answers.items():
            problem = answers.inspected.problem if answers.inspected is not None else ""
            if problem:
                message = f"checkpoint_directory {folder} cannot be written on {node}: {problem}"
                yield Finding(
                    level="error",
                    node=node,
                    reference="checkpoint-directory",
                    message=message,
                    hint="create it on a disk that all nodes share, writable for this user",
                )
            elif answers.inspected is not None and answers.dialled is not None:
                seen[node] = set(answers.dialled.marks)
        for node, marks in seen.items():
            looked = self._dialled_nodes.get(node, ())
            unseen = [writer for writer in looked if writer in seen and self._marks[writer] not in marks]
            if unseen:
                yield Finding(
                    level="error",
                    node=node,
                    reference="checkpoint-not-shared",
                    message=f"checkpoint_directory {folder} is not shared: {node} does not see what "
                    f"{' and '.join(unseen)} {'writes' if len(unseen) == 1 else 'write'} there",
                    hint="name a folder on a file system that all nodes mount, or add `collect:` to the spec, which "
                    "brings checkpoints to nodes that need them",
                )


def _node_findings(node: str, answers: Answers) -> Iterator[Finding]:
    def warn(reference: str, message: str, hint: str = "") -> Finding:
        return Finding(level="warning", node=node, reference=reference, message=message, hint=hint)

    if abs(answers.clock_offset_s) > CLOCK_LIMIT_S:
        ahead = "ahead of" if answers.clock_offset_s > 0 else "behind"
        yield warn("clock", f"the clock of {node} is {abs(answers.clock_offset_s):.1f} s {ahead} ours")
    inspected = answers.inspected
    if inspected is None:
        return
    if inspected.free_bytes < LITTLE_SPACE:
        yield warn("disk-space", f"{node} has {render_size(inspected.free_bytes)} left for the run's files")
    for gpu in inspected.gpus:
        if gpu.used_mib > BUSY_SHARE * gpu.total_mib:
            used = f"{render_size(gpu.used_mib << 20)} of {render_size(gpu.total_mib << 20)}"
            yield warn("gpu-busy", f"GPU {gpu.name} of {node} is busy: {used} are in use")
    if inspected.proxies:
        yield warn(
            "proxy",
            f"{' and '.join(inspected.proxies)} on {node} would send workers' traffic through a proxy; distlaunch "
            "makes TensorFlow bypass it (no_grpc_proxy)",
        )


def _difference(what: str, versions: Mapping[str, str], reference: str, hint: str) -> Iterator[Finding]:
    if len(set(versions.values())) > 1:
        message = f"{what} differs: {_group(versions)}"
        yield Finding(level="warning", node=next(iter(versions)), reference=reference, message=message, hint=hint)


def _advise_python(versions: Mapping[str, str]) -> str:
    usual = _find_usual(versions)
    others = [node for node, version in versions.items() if version != usual]
    return f"name Python {usual} on {', '.join(others)} with `python:`, as in `python: python{usual}`"


def _advise_version(package: str, versions: Mapping[str, str], executables: Mapping[str, str]) -> str:
    """How the nodes with another version get the usual one; empty if its number is not known."""
    usual = _find_usual(versions)
    if not usual[:1].isdigit():
        return ""
    nodes: dict[str, list[str]] = {}
    for node, version in versions.items():
        if version != usual:
            nodes.setdefault(advise_install(f"{package}=={usual}", executables[node]), []).append(node)
    return "; ".join(render_run(names, advice) for advice, names in nodes.items())


def _find_usual(versions: Mapping[str, str]) -> str:
    """The version that most nodes have, the first of equally frequent ones; empty if none has any."""
    counts = Counter(version for version in versions.values() if version != _NONE)
    return counts.most_common(1)[0][0] if counts else ""


def _group(values: Mapping[str, str]) -> str:
    """`2.21.0 on gpu-a, gpu-c; 2.19.0 on gpu-b`."""
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in nodes.items())


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


_NONE = "none"
"""The version of a missing package."""
_BLOCKED = {
    "refused": "a firewall may reject connections: open ports {ports} between the nodes",
    "timed-out": "a firewall may drop packets: open ports {ports} between the nodes",
    "no-route": "a firewall may reject connections, as firewalld does: open ports {ports} between the nodes",
}
"""What may be wrong if a node cannot be reached at an address that it has."""
_CAUSES = {
    "unknown-name": ("the name does not resolve there", "give the node an `address:` in the spec"),
    "refused": (
        "connection refused",
        "another machine may have that address, or a firewall rejects connections; try another address",
    ),
    "timed-out": (
        "no answer",
        "a firewall may drop packets: open ports {ports} between the nodes, or try another address",
    ),
    "no-route": ("no route", "the address belongs to another network: set another `address:`"),
    "other": ("something else answers there", "another machine has that address: set another `address:`"),
}


def _explain(node: str, owner: NodeSpec, result: DialResult, ports: str) -> tuple[str, str]:
    """Why a node cannot reach a task, and what to do about it."""
    target = result.target
    place = format_address(target.host, target.port)
    where = "itself" if node == owner.host else f"{target.task} on {owner.host}"
    message = f"{node} cannot reach {where} at {place}"
    itself = [address for address in result.resolved if _is_loopback(address)]
    if itself and node != owner.host:
        hint = f"/etc/hosts on {node} gives that name to {node} itself: correct it, or give {owner.host} an `address:`"
        return f"{message}: there the name resolves to {itself[0]}, {node} itself", hint
    shown = f" ({', '.join(result.resolved)})" if result.resolved and result.resolved != [target.host] else ""
    cause, hint = _CAUSES.get(result.failure, (result.failure, ""))
    return f"{message}{shown}: {cause}", hint.replace("{ports}", ports)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def make_subjects(
    plan: LaunchPlan, answers: Mapping[str, Answers], addresses: Mapping[str, str], ports: Mapping[TaskId, int]
) -> list[Subject]:
    """The nodes with computing tasks, in the order of the plan.

    A node is measured with the device and the threads of its first computing task, while nothing else computes there.
    So nodes with different numbers of tasks can be compared: a step waits for the slowest *task*, and each task has
    its own share of its node.

    Args:
        plan: the plan with the nodes' facts.
        answers: the nodes' answers to the checks.
        addresses: the addresses that the checks chose, by node.
        ports: the ports held for the tasks.
    """
    return [*_find_subjects(plan, answers, addresses, ports)]


def _find_subjects(
    plan: LaunchPlan, answers: Mapping[str, Answers], addresses: Mapping[str, str], ports: Mapping[TaskId, int]
) -> Iterator[Subject]:
    for node in plan.nodes:
        inspected = answers[node].inspected if node in answers else None
        tasks = [task for task in plan.tasks if task.node == node and not task.task.is_auxiliary]
        computing = [task for task in tasks if task.task.type in plan.rules.computes]
        if inspected is None or not computing:
            continue
        dialled = [task.task for task in tasks if task.task.type != "evaluator" and task.task in ports]
        yield Subject(
            node=node,
            machine=inspected.machine or node,
            methods=inspected.methods,
            env=computing[0].env,
            target=Target(str(dialled[0]), addresses[node], ports[dialled[0]]) if dialled else None,
        )


def choose_dials(nodes: Sequence[str], leader: str | None) -> dict[str, list[str]]:
    """The nodes that each node dials; with few nodes, also itself.

    Among more than ALL_PAIRS nodes, the leader and all others dial each other, because all of TensorFlow's tasks
    connect to the leader's; and each node dials those that are 1, 2, 4, 8, … places behind it, and is dialled by as
    many: neighbours, which the ring of an all-reduce connects, and nodes far away, behind other switches. So 1,000
    nodes dial 12,000 times and not a million times.

    Args:
        nodes: in the order of the spec.
        leader: the node of the task to which all others connect; None if there is no such task.
    """
    if len(nodes) <= ALL_PAIRS:
        return {node: [*nodes] for node in nodes}
    led = [leader] if leader is not None and leader in nodes else []
    chosen: dict[str, list[str]] = {}
    for place, node in enumerate(nodes):
        behind = [nodes[(place + step) % len(nodes)] for step in _steps(len(nodes))]
        wanted = nodes if node == leader else [*led, *behind]
        chosen[node] = [other for other in dict.fromkeys(wanted) if other != node]
    return chosen


def count_partners(nodes: int) -> int:
    """How many nodes other than the leader dial a node, if not all do."""
    return len(_steps(nodes))


def _steps(nodes: int) -> list[int]:
    return [1 << power for power in range((nodes - 1).bit_length())]
