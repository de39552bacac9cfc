"""How often `check --speed` names the right node or link: three nodes with nothing wrong, a slow link, or a slow node.

The nodes are network namespaces, which need root and sshd.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tests.harness.hosts.namespaces import Network, running_network
from tests.harness.hosts.shaping import shape, slow_host, slow_link
from tests.harness.processes.commands import distlaunch_command

SPEC = "program: {command: ['true']}\n"
HOSTS = 3
TIMED_HOSTS = 8


def measure(runs: int) -> None:
    """Prints a line for each kind of cluster."""
    print(f"{HOSTS} nodes that share this machine: what is named how often, and after how many seconds")
    with tempfile.TemporaryDirectory() as folder, running_network(Path(folder), count=HOSTS) as network:
        a, b, _ = network.hosts.values()
        shape(network.hosts.values())
        kinds: dict[str, AbstractContextManager[None]] = {
            "nothing is wrong": contextlib.nullcontext(),
            "gpu-a to gpu-b at a tenth": slow_link(a, b),
            "gpu-b with a CPU quota": slow_host(b),
        }
        for title, fault in kinds.items():
            with fault:
                reports = [check_speed(network) for _ in range(runs)]
            named = Counter(" and ".join(map(name_of, report["speed"]["findings"])) or "nothing" for report in reports)
            seconds = statistics.median(report["speed"]["seconds"] for report in reports)
            shown = ", ".join(f"{name} {count} times" for name, count in named.most_common())
            print(f"  {title:26} {shown} of {runs}; {seconds:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder, running_network(Path(folder), count=TIMED_HOSTS) as network:
        shape(network.hosts.values())
        print(f"  {TIMED_HOSTS} nodes: {check_speed(network)['speed']['seconds']:.1f} s")


def check_speed(network: Network) -> dict[str, Any]:
    """The report of `check --speed --json`."""
    done = network.run(distlaunch_command("check", "--speed", "--json", network.write_spec(SPEC)))
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def name_of(finding: dict[str, Any]) -> str:
    """Such as `slow-node gpu-b` or `slow-link gpu-a`."""
    return f"{finding['reference']} {finding['node']}"
