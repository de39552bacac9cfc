"""How each node of a spec is reached, and at which address the other nodes connect to it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.in_parallel import map_parallel
from launcher.kubernetes.calls import POD_GONE, Kubectl
from launcher.plan.paths import RunPaths
from launcher.slurm.allocation import find_group, find_job
from launcher.slurm.calls import SlurmError
from launcher.slurm.calls import find_addresses as find_slurm_addresses
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import PYTHON, SLURM, NodeSpec
from launcher.spec.parts import ConnectionCommandSpec
from launcher.spec.pods import KUBERNETES, PodsSpec
from launcher.spec.redaction import hide_words
from launcher.transports.agent_process import EarlyAgent
from launcher.transports.base import LinkError, Transport
from launcher.transports.connector import FIRST_S, Connector
from launcher.transports.local import LocalTransport
from launcher.transports.payload import IF_THERE
from launcher.transports.programs import COMMAND, HOST, ProgramConnector
from launcher.transports.remote import RemoteTransport
from launcher.transports.slurm import SlurmConnector, gather
from worker_entry.protocol.frozen import replace

ASKING_AT_ONCE = 8
OPENSSH = (
    "BatchMode=yes",
    f"ConnectTimeout={FIRST_S:.0f}",
    "RemoteCommand=none",
    "NoHostAuthenticationForLocalhost=no",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
    "PermitLocalCommand=no",
    "Tunnel=no",
)
"""Options of `ssh` for a command that has no terminal and never prompts. They take precedence over the user's
configuration: the node cannot use anything of this machine, such as its ssh-agent."""

Targets = Mapping[str, "str | EarlyAgent | Connector"]
"""How each node is reached: a Python or an agent on this machine, or the connector of another machine."""


def find_targets(spec: ClusterSpec, early: EarlyAgent | None = None) -> Targets:
    """How the nodes are reached; asks OpenSSH about every other machine.

    `early`: an agent on this machine that this machine's node uses, if it can.

    Raises:
        UsageError: a node has no usable configuration or Python.
    """
    found = map_parallel(
        lambda node: _find_own(spec, node, early) if node.is_local else find_connector(spec, node),
        spec.nodes,
        ASKING_AT_ONCE,
    )
    targets = {node.host: target for node, target in zip(spec.nodes, found, strict=True)}
    steps = {host: each for host, each in targets.items() if isinstance(each, SlurmConnector)}
    if not steps:
        return targets
    try:
        addresses = find_slurm_addresses([*steps])
    except SlurmError:  # as in a container that has only srun: the names have to suffice
        addresses = {}
    gathered = gather([replace(each, address=addresses.get(each.host)) for each in steps.values()])
    return {**targets, **{each.host: each for each in gathered}}


def find_addresses(spec: ClusterSpec, targets: Targets) -> dict[str, str]:
    """For each node without an address in the spec, the address at which its connector reaches it, by host.

    They are not merged into the spec, where one address for two hosts is an error; for SSH it is not.
    """
    reached = {}
    for node in spec.nodes:
        target = targets[node.host]
        if isinstance(target, (str, EarlyAgent)):
            continue
        if target.address and node.address is None and node.addresses is None:
            reached[node.host] = target.address
    return reached


def find_connector(spec: ClusterSpec, node: NodeSpec) -> Connector:
    """The connector of a node that is another machine.

    Raises:
        UsageError: its configuration cannot be used, or its program is missing.
    """
    connection = node.connection or spec.connection
    if isinstance(connection, ConnectionCommandSpec):
        return _by_program(node, connection.command)
    if connection == "slurm":
        return SlurmConnector(find_job(os.environ), node.host, group=find_group(os.environ, node.host))
    if connection == "docker":
        return _by_program(node, ["docker", "exec", "-i", HOST])
    if connection == KUBERNETES:
        source = spec.source
        kubectl = Kubectl(source.context, source.namespace) if isinstance(source, PodsSpec) else Kubectl()
        return _by_program(node, [*kubectl.words, "exec", "-i", HOST, "--"], kubectl=True)
    from launcher.transports.ssh.config import SshOverrides, as_words, load_target
    from launcher.transports.ssh.limits import find_limit

    given = SshOverrides(**{**spec.ssh.model_dump(exclude_none=True), **node.ssh.model_dump(exclude_none=True)})
    try:
        target = load_target(node.host, given)
    except LinkError as error:
        raise UsageError(f"{node.host}: {error}") from None
    accept_new = spec.host_keys == "accept-new"
    is_chosen = node.connection is not None or "connection" in spec.model_fields_set
    limit = "" if is_chosen or shutil.which("ssh") is None else find_limit(target)
    if connection == "openssh" or limit:
        options = [*OPENSSH, *given.options(), *given.known_hosts_options(), *target.cipher_options()]
        options += ["GSSAPIDelegateCredentials=no"] if target.delegates else []
        options.append(f"StrictHostKeyChecking={'accept-new' if accept_new else 'yes'}")
        note = f"node {node.host}: uses your own ssh, because {limit}; `connection:` overrides this" if limit else ""
        connector = _by_program(node, ["ssh", "-T", *as_words(options), "--", HOST, COMMAND], target.hostname, note)
        own = as_words([*given.options(), *given.known_hosts_options()])
        return replace(connector, hints=_make_ssh_hints(node.host, own))
    from launcher.transports.ssh.connector import ParamikoConnector

    return ParamikoConnector(target, accept_new=accept_new)


def _make_ssh_hints(host: str, words: list[str]) -> tuple[tuple[str, str], ...]:
    """What to do about the errors of `ssh` on the way to a new host; a person can answer what BatchMode refuses.

    `words`: the options that the user has given.
    """
    ask, let_in = shlex.join(["ssh", *words, host, "true"]), shlex.join(["ssh-copy-id", *words, host])
    return (
        ("Host key verification failed", f"to see and compare its fingerprint, run: {ask}"),
        ("Permission denied (", f"if you have no key, make one with ssh-keygen; to let it in, run: {let_in}"),
        ("Could not resolve hostname", "add it to ~/.ssh/config, or give its address with ssh.hostname"),
    )


def _by_program(
    node: NodeSpec,
    words: list[str],
    address: str | None = None,
    note: str = "",
    *,
    kubectl: bool = False,
) -> ProgramConnector:
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{node.host}: {words[0]}, the program of its connection, is not on PATH",
            hint=f"the connection is {shlex.join(hide_words(words))}",
        )
    connector = ProgramConnector(tuple(words), node.host, address, note)
    return replace(connector, gone=POD_GONE, hides_breaks=True) if kubectl else connector


def name_python(spec: ClusterSpec, node: NodeSpec) -> str:
    """The interpreter to ask another machine for; see `Payload.opening`."""
    if sys.prefix == sys.base_prefix or isinstance(spec.source, PodsSpec):
        return spec.find_python(node)
    return spec.find_python(node, found="" if node.connection == SLURM else f"{IF_THERE}{sys.prefix}/bin/{PYTHON}")


def _find_own(spec: ClusterSpec, node: NodeSpec, early: EarlyAgent | None) -> str | EarlyAgent:
    python = _find_own_python(spec, node)
    return python if early is None or early.python != python or spec.keep_warm_s else early


def _find_own_python(spec: ClusterSpec, node: NodeSpec) -> str:
    name = os.path.expanduser(spec.find_python(node))  # noqa: PTH111 - keeps a name without a slash
    found = shutil.which(name)
    if found is None:
        raise UsageError(
            f"no Python interpreter at {name}" if os.sep in name else f"no {name} on PATH",
            hint="name one with --python, or with `python:` in a spec",
        )
    return found


def make_transport(
    spec: ClusterSpec, node: NodeSpec, target: str | EarlyAgent | Connector, files: RunPaths, run_id: str
) -> Transport:
    if isinstance(target, EarlyAgent):
        return LocalTransport(files.agent_errors, target.python, run_id=run_id, early=target)
    if isinstance(target, str):
        return LocalTransport(files.agent_errors, target, run_id=run_id, may_stay=spec.keep_warm_s > 0)
    return RemoteTransport(target, name_python(spec, node), run_id=run_id, may_stay=spec.keep_warm_s > 0)
