"""Reads the nodes of a spec from a command's output: lines of hosts, or JSON.

JSON is a list of hosts, a list of objects with the fields of a node, or the output of `ansible-inventory --list`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic_core import ValidationError

from launcher.spec.explain import explain_fields
from launcher.spec.hosts import HostError, parse_host, parse_lines
from launcher.spec.models import ClusterSpec

_ANSIBLE_SSH = {
    "ansible_host": "hostname",
    "ansible_port": "port",
    "ansible_user": "user",
    "ansible_ssh_private_key_file": "identity_file",
}
"""Variables of an Ansible host, and the field of `ssh:` for each."""

_BRACKETED = re.compile(r"\[[0-9A-Fa-f]*:")
"""The beginning of a line whose host is an IPv6 address; in JSON, other characters follow the bracket."""


class NodeListError(ValueError):
    """The text is not a list of nodes; `errors` says why."""

    def __init__(self, *errors: str) -> None:
        super().__init__("; ".join(errors))
        self.errors = errors


def parse_node_list(data: bytes) -> list[Mapping[str, Any]]:
    """Returns the fields of each node, not yet validated.

    Raises:
        NodeListError: the data names no node, or cannot be read.
    """
    try:
        text = data.decode().removeprefix("\ufeff").strip()
    except UnicodeDecodeError as error:
        raise NodeListError(f"byte {data[error.start]:#04x} is not UTF-8") from None
    if not text:
        raise NodeListError("nothing was printed; print one host a line, or JSON")
    is_json = text[0] == "{" or (text[0] == "[" and not _BRACKETED.match(text))
    nodes = [*_read_json(text)] if is_json else _read_lines(text)
    if not nodes:
        raise NodeListError("no node is named; print one host a line, or JSON")
    return nodes


def take_nodes(spec: ClusterSpec, data: bytes) -> ClusterSpec:
    """The spec with the nodes in a command's output.

    Raises:
        NodeListError: the nodes cannot be read, or make the spec invalid.
    """
    return take_fields(spec, parse_node_list(data))


def take_fields(spec: ClusterSpec, nodes: Iterable[Mapping[str, Any]]) -> ClusterSpec:
    """The spec with nodes of these fields.

    Raises:
        NodeListError: the nodes make the spec invalid.
    """
    try:
        return spec.with_nodes(nodes)
    except ValidationError as error:
        raise NodeListError(*explain_fields(error)) from None


def _read_lines(text: str) -> list[Mapping[str, Any]]:
    hosts, errors = parse_lines(text)
    if errors:
        raise NodeListError(*errors)
    return [host.fields() for host in hosts]


def _read_json(text: str) -> Iterator[Mapping[str, Any]]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise NodeListError(f"not JSON: {error}") from None
    except RecursionError:
        raise NodeListError("not JSON: nested too deeply") from None
    if isinstance(value, dict):
        yield from _read_inventory(value)
        return
    for index, item in enumerate(value):
        if isinstance(item, dict):
            yield item
        elif isinstance(item, str):
            try:
                yield parse_host(item).fields()
            except HostError as error:
                raise NodeListError(f"[{index}]: {error}") from None
        else:
            raise NodeListError(f"[{index}]: expected a host or the fields of a node, got {str(item)[:80]!r}")


def _read_inventory(inventory: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the hosts of all groups, in order."""
    names: dict[str, None] = {}
    for title, group in inventory.items():
        hosts = group.get("hosts", []) if isinstance(group, dict) else group
        if title == "_meta":
            continue
        if not isinstance(hosts, list) or not all(isinstance(name, str) for name in hosts):
            raise NodeListError(f"{title[:80]}: expected a group of hosts, as `ansible-inventory --list` prints it")
        names |= dict.fromkeys(hosts)
    meta = inventory.get("_meta")
    known = meta.get("hostvars") if isinstance(meta, dict) else None
    for name in names:
        variables = known.get(name) if isinstance(known, dict) else None
        yield _read_ansible_host(name, variables if isinstance(variables, dict) else {})


def _read_ansible_host(name: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"host": "local" if variables.get("ansible_connection") == "local" else name}
    ssh = {field: variables[name] for name, field in _ANSIBLE_SSH.items() if variables.get(name) is not None}
    if ssh:
        fields["ssh"] = ssh
    if "slots" in variables:
        fields["tasks"] = {"worker": variables["slots"]}
    python = variables.get("ansible_python_interpreter")
    if isinstance(python, str) and python.startswith("/"):  # only Ansible understands other values, like `auto`
        fields["python"] = python
    return fields
