"""The network in which sockets are made: a socket stays in the network of the process that made it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from typing import Optional, Union

from worker_entry.protocol.frozen import dataclass
from worker_entry.system import kernel

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
_GET_ADDRESSES, _NEW_ADDRESS, _DONE = 22, 20, 3
_DUMP_REQUEST = 0x301
_HEADER = struct.Struct("=IHHII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_OF_PEER, _LOCAL = 1, 2
"""IFA_ADDRESS, which is the peer's address on a point-to-point link, and IFA_LOCAL."""


@dataclass(frozen=True)
class PortUse:
    """The holder of a port, if it can be found; `closing`: only closing connections of no process use the port."""

    holder: Optional[str]
    closing: bool


class Network:
    """This process's own network."""

    def make_socket(self, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        """Returns a new socket.

        Raises:
            OSError: the system does not support the family, or is out of sockets.
        """
        return socket.socket(family, kind, protocol)

    def look_up(self, port: int) -> PortUse:
        """Returns the users of this port, as far as they can be found."""
        return PortUse(kernel.port_holder(port), kernel.only_closing(port))


HERE = Network()


def own_addresses(network: Network = HERE) -> list[Address]:
    """All addresses of a network namespace (rtnetlink(7)), loopback included; empty if the kernel cannot be asked."""
    found: list[Address] = []
    with contextlib.suppress(OSError, AttributeError, ValueError, struct.error):
        with network.make_socket(socket.AF_NETLINK, socket.SOCK_RAW) as asking:  # NETLINK_ROUTE
            asking.settimeout(1.0)
            body = struct.pack("=Bxxx", socket.AF_UNSPEC) + b"\0" * 4
            asking.send(_HEADER.pack(_HEADER.size + len(body), _GET_ADDRESSES, _DUMP_REQUEST, 1, os.getpid()) + body)
            while _read_addresses(asking.recv(1 << 17), found):
                pass
    return found


def _read_addresses(data: bytes, found: list[Address]) -> bool:
    """Appends the addresses in one answer to `found`; returns whether another answer follows."""
    at = 0
    while at < len(data):
        length, kind = _HEADER.unpack_from(data, at)[:2]
        if kind == _DONE or length < _HEADER.size:
            return False
        if kind == _NEW_ADDRESS:
            attributes = _read_attributes(data[at + _HEADER.size + _ADDRESS.size : at + length])
            packed = attributes.get(_LOCAL) or attributes.get(_OF_PEER)
            if packed is not None:
                found.append(ipaddress.ip_address(packed))
        at += -(-length // 4) * 4
    return True


def _read_attributes(data: bytes) -> dict[int, bytes]:
    attributes, at = {}, 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = data[at + _ATTRIBUTE.size : at + length]
        at += -(-length // 4) * 4
    return attributes
