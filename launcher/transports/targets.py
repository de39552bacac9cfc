"""How each node of a spec is reached, and at which address the other nodes connect to it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.plan.paths import RunPaths
from launcher.spec.models import ClusterSpec, NodeSpec
from launcher.transports.base import LinkError, Transport
from launcher.transports.in_parallel import map_parallel
from launcher.transports.local import LocalTransport

if TYPE_CHECKING:
    from launcher.transports.ssh.config import SshTarget

ASKING_AT_ONCE = 8

Targets = Mapping[str, "str | SshTarget"]
"""How each node is reached: by its Python on this machine, or over SSH."""


def find_targets(spec: ClusterSpec) -> Targets:
    """How the nodes are reached; asks OpenSSH about every other machine.

    Raises:
        UsageError: a node has no usable configuration or Python.
    """
    found = map_parallel(
        lambda node: _find_python(node) if node.is_local else find_target(spec, node), spec.nodes, ASKING_AT_ONCE
    )
    return {node.host: target for node, target in zip(spec.nodes, found, strict=True)}


def find_addresses(spec: ClusterSpec, targets: Targets) -> dict[str, str]:
    """The addresses at which SSH reaches the nodes without an address in the spec, by host.

    They are not merged into the spec, where one address for two hosts is a mistake; for SSH it is not.
    """
    reached = {}
    for node in spec.nodes:
        target = targets[node.host]
        if not isinstance(target, str) and node.address is None and node.addresses is None:
            reached[node.host] = target.hostname
    return reached


def find_target(spec: ClusterSpec, node: NodeSpec) -> SshTarget:
    from launcher.transports.ssh.config import SshOverrides, load_target

    given = {**spec.ssh.model_dump(exclude_none=True), **node.ssh.model_dump(exclude_none=True)}
    try:
        return load_target(node.host, SshOverrides(**given))
    except LinkError as error:
        raise UsageError(f"{node.host}: {error}") from None


def _find_python(node: NodeSpec) -> str:
    name = os.path.expanduser(node.python or sys.executable)  # noqa: PTH111 - keeps a name without a slash
    found = shutil.which(name)
    if found is None:
        raise UsageError(
            f"no Python interpreter at {name}" if os.sep in name else f"no {name} on PATH",
            hint="set one with --python (`python:` in a spec)",
        )
    return found


def make_transport(
    spec: ClusterSpec, node: NodeSpec, target: str | SshTarget, files: RunPaths, run_id: str
) -> Transport:
    if isinstance(target, str):
        return LocalTransport(files.agent_errors, target, run_id=run_id)
    from launcher.transports.ssh.transport import SshTransport

    return SshTransport(target, node.python or "python3", accept_new=spec.host_keys == "accept-new")
