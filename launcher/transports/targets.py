"""How each node of a spec is reached, and at which address the others dial it."""

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
    """How the nodes are reached.

    Raises:
        UsageError: there is no way to one of them.
    """
    # For every other machine, OpenSSH is asked.
    found = map_parallel(
        lambda node: _find_python(node) if node.is_local else find_target(spec, node), spec.nodes, ASKING_AT_ONCE
    )
    return {node.host: way for node, way in zip(spec.nodes, found, strict=True)}


def find_addresses(spec: ClusterSpec, targets: Targets) -> dict[str, str]:
    """The addresses by which SSH reaches the nodes whose spec names none, by host.

    They are kept apart from the spec: two of its hosts may be one machine to SSH, which is no contradiction.
    """
    reached = {}
    for node in spec.nodes:
        way = targets[node.host]
        if not isinstance(way, str) and node.address is None and node.addresses is None:
            reached[node.host] = way.hostname
    return reached


def find_target(spec: ClusterSpec, node: NodeSpec) -> SshTarget:
    from launcher.transports.ssh.config import SshOverrides, load_target

    given = {**spec.ssh.model_dump(exclude_none=True), **node.ssh.model_dump(exclude_none=True)}
    try:
        return load_target(node.host, SshOverrides(**given))
    except LinkError as error:
        raise UsageError(f"{node.host}: {error}") from None


def _find_python(node: NodeSpec) -> str:
    name = os.path.expanduser(node.python or sys.executable)  # noqa: PTH111 - a name without a slash stays one
    found = shutil.which(name)
    if found is None:
        raise UsageError(
            f"no Python interpreter at {name}" if os.sep in name else f"no {name} on PATH",
            hint="name one with --python (`python:` in a spec)",
        )
    return found


def make_transport(spec: ClusterSpec, node: NodeSpec, way: str | SshTarget, files: RunPaths, run_id: str) -> Transport:
    if isinstance(way, str):
        return LocalTransport(files.agent_errors, way, run_id=run_id)
    from launcher.transports.ssh.transport import SshTransport

    return SshTransport(way, node.python or "python3", accept_new=spec.host_keys == "accept-new")
