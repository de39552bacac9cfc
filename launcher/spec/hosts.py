"""Parses hosts and their slots, as given by `-H`, host files, and commands that list nodes.

A host is `gpu-a`, `gpu-a:2` (two slots), `alice@gpu-a`, `[fd00::1]:2`, or `ssh://alice@gpu-a:2222` with the port of
sshd, after which slots may follow. A line of a host file may also have `slots=2`. A slot is one worker.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Any

from launcher.tasks import LOCAL
from worker_entry.protocol.frozen import dataclass, replace

SLOTS_LIMIT = 1024
"""The maximum number of slots of one host; a larger number is probably the port of sshd."""

_NAME = r"(?P<name>(?:[^@:/\[\]]+@)?(?:\[[^\]]*\]|[^@:/\[\]]+))"
_PLAIN = re.compile(rf"{_NAME}(?::(?P<slots>[0-9]{{1,9}}))?")
_URL = re.compile(rf"ssh://{_NAME}(?::(?P<port>[0-9]{{1,9}})(?::(?P<slots>[0-9]{{1,9}}))?)?/?")
_NUMBER = re.compile(r"[0-9]{1,9}")


class HostError(ValueError):
    """A host, or a line of a host file, is invalid; the message says what is expected."""


@dataclass(frozen=True)
class Host:
    """A machine and its workers. `port`: the port of sshd, if given."""

    name: str
    slots: int = 1
    port: int | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of the host's node in a spec, not yet validated."""
        fields: dict[str, Any] = {"host": self.name}
        if self.slots != 1:
            fields["tasks"] = {"worker": self.slots}
        if self.port is not None:
            fields["ssh"] = {"port": self.port}
        return fields


def parse_host(text: str) -> Host:
    """Parses one host.

    Raises:
        HostError: the text is not a host.
    """
    return _read(text)[0]


def parse_hosts(texts: Iterable[str]) -> list[Host]:
    """Parses the hosts of `-H a:2,b:2`, which may be given several times.

    Raises:
        HostError: a host is invalid.
    """
    return _merge([parse_host(name.strip()) for text in texts for name in text.split(",")])


def parse_lines(text: str) -> tuple[list[Host], list[str]]:
    """Returns the hosts in lines like `gpu-a`, `gpu-a:2` or `gpu-a slots=2`, and a message for each invalid line.

    Ignores `max_slots=`, empty lines and comments.
    """
    hosts, errors = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", re.sub(r"(^|\s)#.*", "", line)).split()
        if not words:
            continue
        try:
            hosts.append(_read_line(words))
        except HostError as error:
            errors.append(f"line {number}: {error}")
    return _merge(hosts), errors


def _read_line(words: Sequence[str]) -> Host:
    host, slots = _read(words[0])
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name not in ("slots", "max_slots", "max-slots") or not _NUMBER.fullmatch(value):
            raise HostError(f"expected a host, `HOST:SLOTS` or `HOST slots=N`, got {' '.join(words)[:80]!r}")
        if name == "slots":
            if slots is not None:
                raise HostError(f"{words[0]} gives its slots twice; keep one")
            slots = _check_slots(host.name, int(value))
    return replace(host, slots=1 if slots is None else slots)


def _read(text: str) -> tuple[Host, int | None]:
    """Parses a host, and its slots if given."""
    if _is_ipv6(text.rpartition("@")[2]):  # without brackets, the whole text is the address
        return Host(text), None
    found = (_URL if text.startswith("ssh://") else _PLAIN).fullmatch(text)
    if found is None:
        raise HostError(f"expected a host, or `HOST:SLOTS` like `gpu-a:2`, got {text[:80]!r}")
    given = found.groupdict()
    slots = None if given["slots"] is None else _check_slots(given["name"], int(given["slots"]))
    port = None if given.get("port") is None else int(given["port"])
    name = LOCAL if given["name"] == "localhost" and port is None else given["name"]
    return Host(name, 1 if slots is None else slots, port), slots


def _check_slots(name: str, slots: int) -> int:
    if slots < 1:
        raise HostError(f"{name} has no slots; give it at least one, or remove it")
    if slots > SLOTS_LIMIT:
        raise HostError(
            f"{slots} slots on {name} are more than {SLOTS_LIMIT}; write the port of sshd as ssh://{name}:{slots}"
        )
    return slots


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _merge(hosts: Sequence[Host]) -> list[Host]:
    """Merges repeated hosts and adds up their slots; keeps the order."""
    slots: dict[tuple[str, int | None], int] = {}
    for host in hosts:
        key = (host.name, host.port)
        slots[key] = slots.get(key, 0) + host.slots
    return [Host(name, count, port) for (name, port), count in slots.items()]
