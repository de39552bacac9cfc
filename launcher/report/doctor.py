"""The report of `distlaunch doctor` on this machine and others: a line for each fact, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from launcher.report.models import CheckReport, FactsReport, NodeReport
from launcher.result import Result
from launcher.spec.nodes import PYTHON
from launcher.tasks import LOCAL
from launcher.wording import count_of, render_run
from worker_entry.protocol.advice import advise_install
from worker_entry.protocol.units import render_size

Level = Literal["ok", "warning", "error"]

HERE = "this machine"
"""The `place` of lines about the machine that runs distlaunch."""
LITTLE_SPACE = 1 << 30
FEW_FILES = 1024
"""TensorFlow and gRPC keep some hundred files open; a data pipeline of many shards keeps more."""

COSTS: Mapping[str, tuple[str, str]] = {
    "pidfd": (
        "processes are signalled by number: one that ends at this moment could be confused with a new one",
        "use Linux 5.3 or newer, and a container whose seccomp profile allows pidfd_open",
    ),
    "file-events": (
        "new files of TensorBoard and checkpoints are found by polling",
        "raise fs.inotify.max_user_instances",
    ),
    "port-filter": (
        "other machines can connect to the tasks' ports, in spite of `guard: auto`",
        "use Linux 4.5 or newer, or close the ports in a firewall",
    ),
    "namespaces": (
        "`isolation: namespace` and `tunnel` are not possible",
        "allow user namespaces (kernel.unprivileged_userns_clone=1, user.max_net_namespaces), or run as root",
    ),
    "memory-group": (
        "a task that the kernel kills for its memory may be reported as task-killed",
        "run in a control group that counts memory, as systemd's user sessions and containers do",
    ),
}
"""By feature of `worker_entry.system.features`: what its absence costs, and what helps."""


Judgement = tuple[Level, str, str, str]
"""The level, the subject, the message and the hint of a line."""


class DoctorLine(Result):
    """One fact."""

    place: str
    """The machine: `this machine`, or the host of `-H`."""
    level: Level
    """The severity; a cluster cannot run with an error."""
    subject: str
    """`Python`, `TensorFlow`, `ssh keys`, …"""
    message: str
    """The fact."""
    hint: str = ""
    """What to do; empty if the fact is ok."""


class DoctorReport(Result):
    """What `distlaunch doctor --json` prints."""

    ok: bool
    """Whether there is no error."""
    lines: list[DoctorLine]
    """All lines, in the order of the machines."""


class OwnFacts(Result):
    """What distlaunch found on the machine that runs it."""

    version: str
    """The version of distlaunch."""
    state: str
    """The folder of the runs."""
    state_problem: str
    """Why the folder of the runs cannot be written; empty if it can be."""
    state_free: int
    """Free bytes on the disk of that folder."""
    config: str
    """The file of defaults; empty if there is none."""
    keys: list[str]
    """The SSH keys that are tried for a host without settings of its own."""
    locked_keys: list[str]
    """Files of keys that need a passphrase."""
    key_problem: str
    """Why keys cannot be listed."""
    known_hosts: int
    """Host keys in the user's known_hosts."""
    proxies: list[str]
    """Variables that name a proxy."""
    tools: dict[str, str]
    """The programs that some connections need, and their paths; empty if missing."""


def make_report(own: OwnFacts, check: CheckReport, ports: tuple[int, int]) -> DoctorReport:
    """The lines about this machine, and about each node with the findings of the checks.

    Args:
        own: what distlaunch found here.
        check: the checks of the nodes, with facts.
        ports: the range from which tasks get ports.
    """
    judged = [(HERE, each) for each in _judge_own(own)]
    for node in check.nodes:
        place = HERE if node.node == LOCAL else node.node
        judged += [(place, each) for each in _judge_node(node, ports)]
        judged += [
            (place, (each.level, each.reference, each.message, each.hint))
            for each in check.findings
            if each.node == node.node
        ]
    lines = [
        DoctorLine(place=place, level=level, subject=subject, message=message, hint=hint)
        for place, (level, subject, message, hint) in judged
    ]
    return DoctorReport(ok=not any(line.level == "error" for line in lines), lines=lines)


def render(report: DoctorReport) -> list[str]:
    """The lines as text, by machine."""
    lines: list[str] = []
    width = max(len(line.subject) for line in report.lines)
    place = ""
    for line in report.lines:
        if line.place != place:
            place = line.place
            lines += [*([""] if lines else []), place]
        lines.append(f"  {line.level:<7}  {line.subject:<{width}}  {line.message}")
        lines += [f"  {'':<7}  {'':<{width}}  → {line.hint}"] if line.hint else []
    counts = [
        count_of(number, level)
        for level in ("error", "warning")
        if (number := sum(line.level == level for line in report.lines))
    ]
    return [*lines, "", " and ".join(counts) if counts else "No problems found."]


def _judge_own(own: OwnFacts) -> Iterator[Judgement]:
    yield "ok", "distlaunch", own.version, ""
    if own.state_problem:
        message = f"{own.state} cannot be written: {own.state_problem}"
        yield "error", "state folder", message, "set XDG_STATE_HOME, or use --run-dir"
    elif own.state_free < LITTLE_SPACE:
        message = f"{own.state}, {render_size(own.state_free)} free"
        yield "warning", "state folder", message, "`distlaunch prune --dry-run` shows what old runs take"
    else:
        yield "ok", "state folder", f"{own.state}, {render_size(own.state_free)} free", ""
    yield "ok", "defaults", own.config or "none", ""
    if own.key_problem:
        yield "warning", "ssh keys", own.key_problem, "correct ~/.ssh/config"
    elif own.keys:
        yield "ok", "ssh keys", ", ".join(own.keys), ""
    elif not own.locked_keys:
        yield "warning", "ssh keys", "none, so no other machine lets distlaunch in", "make one with ssh-keygen"
    if own.locked_keys:
        message = f"{', '.join(own.locked_keys)} need{'s' if len(own.locked_keys) == 1 else ''} a passphrase"
        yield "ok" if own.keys else "warning", "locked keys", message, "unlock with ssh-add"
    yield "ok", "known hosts", str(own.known_hosts), ""
    if own.proxies:
        yield "ok", "proxies", f"{', '.join(own.proxies)}; TensorFlow's own traffic bypasses them", ""
    there = [name for name, path in own.tools.items() if path]
    missing = [name for name, path in own.tools.items() if not path]
    yield "ok", "tools", ", ".join([*there, *(f"no {name}" for name in missing)]), ""


def _judge_node(node: NodeReport, ports: tuple[int, int]) -> Iterator[Judgement]:
    if node.hostname is None:  # a finding says why
        return
    yield "ok", "Python", f"{node.python}, {node.executable}", ""
    facts = node.facts
    if facts is None:  # a finding says why the node was not inspected
        return
    yield from _judge_frameworks(node)
    memory = f", {render_size(facts.memory)} of memory" if facts.memory else ""
    yield "ok", "machine", f"{facts.kernel}, {count_of(node.cores or 0, 'core')}{memory}", ""
    yield from _judge_gpus(node, facts)
    if node.node != LOCAL:
        yield "ok", "disk", f"{render_size(node.free_bytes or 0)} free", ""
        yield "ok", "clock", f"{node.clock_offset_s or 0:+.3f} s", ""
    if facts.open_files is not None and facts.open_files < FEW_FILES:
        yield "warning", "open files", f"at most {facts.open_files} per process", f"ulimit -n {4 * FEW_FILES}"
    yield _judge_ports(facts, ports)
    for name in facts.missing:
        cost, hint = COSTS.get(name, ("", ""))
        yield "warning", name, f"missing: {cost}", hint
    if not facts.missing:
        yield "ok", "features", "all that distlaunch uses", ""


def _judge_frameworks(node: NodeReport) -> Iterator[Judgement]:
    python = node.executable or PYTHON
    if node.tensorflow is None:
        hint = render_run([node.node], advise_install("tensorflow", python))
        yield "warning", "TensorFlow", "not installed", hint
        return
    yield "ok", "TensorFlow", node.tensorflow, ""
    if node.keras is None:
        yield "warning", "Keras", "not installed", render_run([node.node], advise_install("keras", python))
    else:
        yield "ok", "Keras", node.keras, ""


def _judge_gpus(node: NodeReport, facts: FactsReport) -> Iterator[Judgement]:
    if not node.gpus:
        yield "ok", "GPUs", "none", ""
        return
    count = count_of(len(node.gpus), "GPU")
    driver = f", driver {facts.driver}" if facts.driver else ""
    seen = facts.tensorflow_gpus
    if node.tensorflow is not None and seen is None:
        yield (
            "error",
            "GPUs",
            f"{count}{driver}, but TensorFlow cannot be imported",
            "run `python -c 'import tensorflow'` there to see why",
        )
    elif seen is not None and seen < len(node.gpus):
        which = "none" if not seen else f"only {seen}"
        message = f"{count}{driver}, but TensorFlow sees {which} of them"
        yield "error", "GPUs", message, "pip install 'tensorflow[and-cuda]', with a driver for its CUDA"
    else:
        yield "ok", "GPUs", f"{count}{driver}", ""


def _judge_ports(facts: FactsReport, ports: tuple[int, int]) -> Judgement:
    first, last = ports
    wanted = f"{first}-{last}"
    outgoing = facts.outgoing_ports
    if outgoing is None or outgoing[1] < first or outgoing[0] > last or _covers(facts.reserved_ports, ports):
        return "ok", "ports", wanted, ""
    message = f"the kernel gives ports of {wanted} to outgoing connections ({outgoing[0]}-{outgoing[1]})"
    return "warning", "ports", message, f"sysctl -w net.ipv4.ip_local_reserved_ports={wanted}"


def _covers(reserved: str, ports: Sequence[int]) -> bool:
    """Whether a range of the text contains all of these ports."""
    for part in reserved.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and int(first) <= ports[0] and int(last or first) >= ports[1]:
            return True
    return False
