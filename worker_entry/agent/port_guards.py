"""Protects the tasks' ports from unknown peers: TensorFlow's server would execute any client's requests.

TensorFlow listens on all interfaces, without authentication, and no option changes that. But the agent holds each
port with a socket that listens as well, in the same reuseport group, before TensorFlow does. A filter in the kernel
gives each new connection to TensorFlow if its source address may reach the port, and otherwise to the agent's socket,
the guard, which resets it. So the port is never open to others, and the tasks' data need no detour.

While TensorFlow does not listen, the guard gets all connections. It then answers the other nodes' checks.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

from worker_entry.agent.checks.answering import Answering
from worker_entry.agent.helpers.child_work import ChildWork
from worker_entry.agent.helpers.works import RESOLVE
from worker_entry.agent.network.outer import OuterNetwork
from worker_entry.protocol.messages import ConnectionsRejected, Refused, Unguarded
from worker_entry.system.address_filter import Network, TooManyError, compile_filter
from worker_entry.system.callers import Listener
from worker_entry.system.network import HERE, Address, own_addresses
from worker_entry.system.ports import NOBODY, HeldPorts, attach_filter, has_ipv4_listener, render_unguarded

if TYPE_CHECKING:
    from typing import TypeGuard  # since Python 3.10

LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1"))
ALL: tuple[Network, ...] = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
ACCEPTED_AT_ONCE = 64
LOOPBACK_INDEX = 1
"""The index of the loopback interface, in every network namespace."""
ADDRESSES = 100
"""Unknown peers that are counted separately for each port."""
SETTLE_S = 1.0
"""How long the connections of an unknown peer are counted before they are reported."""
RESOLVE_S = 5.0
"""How long the start of the tasks waits for a name server; a node resolved later may reach the ports from then on."""
_RESET = struct.pack("ii", 1, 0)


class PortGuards:
    """The guards of one node's ports. `send` gets reports of refused connections.

    `serve` takes over the connection of a caller that measures the link, in the mode that the caller asks for.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        send: Callable[[Union[ConnectionsRejected, Unguarded, Refused]], None],
        serve: Callable[[socket.socket, str], None],
    ) -> None:
        self.outer: Optional[OuterNetwork] = None
        """Where the ports are held, if not in this process's network."""
        self._selector = selector
        self._send = send
        self._answering = Answering(selector, serve)
        self._guards: dict[str, _Guard] = {}
        self._own: list[Network] = []
        self._own_scoped: set[ipaddress.IPv6Address] = set()
        """Its link-local addresses, with which its own packets come through the loopback interface."""
        self._allowed: list[Network] = []
        self._work = ChildWork(selector)
        self._waits_until = 0.0
        self._required = False
        self._met: set[Address] = set()
        """The addresses from which the other nodes of the cluster have called; kept for later attempts."""

    def begin(self, ports: HeldPorts, allowed: Iterable[str], nonce: str, *, required: bool = False) -> None:
        """Guards the held ports that can be guarded.

        Args:
            ports: just held.
            allowed: networks whose addresses may reach the ports, besides this node's own.
            nonce: proves that a caller belongs to the cluster; empty if no calls are expected.
            required: whether the node refuses the attempt if a guard has to be given up.
        """
        self.end()
        self._required = required
        own = own_addresses(self.outer or HERE)
        self._own = [*LOOPBACK, *(ipaddress.ip_network(each) for each in own if not _is_scoped(each))]
        self._own_scoped = {ipaddress.IPv6Address(f"{each}%{LOOPBACK_INDEX}") for each in own if _is_scoped(each)}
        self._allowed = [ipaddress.ip_network(network, strict=False) for network in allowed]
        for task, listener in ports.guarded.items():
            self._guards[task] = guard = _Guard(task, listener, self._may_reach, self._make_answer(nonce, task))
            self._selector.register(guard.listener, selectors.EVENT_READ, guard.accept)
        self._attach()
        if self.outer is None:  # in another network, a plain connection shows whether a task listens
            ports.probe = self.is_joined

    def _make_answer(self, nonce: str, task: str) -> Optional[Callable[[socket.socket, Address], None]]:
        """A function that answers the callers of a port; None if no calls are expected."""

        def answer(caller: socket.socket, address: Address) -> None:
            self._answering.take(caller, str(address), nonce, task, lambda: self._met.add(address))

        return answer if nonce else None

    def learn(self, hosts: Iterable[str]) -> None:
        """Lets the cluster's machines, by name or address, reach the ports; calls are no longer answered."""
        self._end_calls()
        names = set()
        for host in hosts:
            try:
                self._met.add(_address(host))
            except ValueError:
                names.add(host)
        self._attach()
        if names and self._guards:
            self._waits_until = time.monotonic() + RESOLVE_S
            self._work.begin(RESOLVE, json.dumps([*names]).encode(), self._note_resolved, self.outer)

    def settled(self, now: float) -> bool:
        """Whether the resolution of the cluster's names has finished or timed out; `now`: monotonic seconds."""
        return now >= self._waits_until

    def _note_resolved(self, answer: bytes) -> None:
        self._waits_until = 0.0
        for addresses in json.loads(answer or "{}").values():
            self._met.update(map(_address, addresses))
        self._attach()

    def is_joined(self, task: str, port: int) -> Optional[bool]:
        """Whether the task listens; None for a port without a guard."""
        guard = self._guards.get(task)
        if guard is None or not guard.is_joined(port):
            return None if guard is None else False
        dual = guard.listener.family == socket.AF_INET6
        if dual and has_ipv4_listener(port):  # the kernel prefers it, and it shares no filter with the guard
            self._send(Unguarded(task, "its program listens on IPv4 alone"))
        return True

    def poll(self, now: float) -> None:
        """Reports the unknown peers that have called, and drops callers that are late; `now`: monotonic seconds."""
        self._answering.poll(now)
        for guard in self._guards.values():
            for address, count in guard.take_unknown(now):
                self._send(ConnectionsRejected(guard.task, address, count))

    def end(self) -> None:
        """Removes the guards; the caller releases the ports."""
        self.poll(float("inf"))
        self._work.cancel()
        self._waits_until = 0.0
        self._end_calls()
        for guard in self._guards.values():
            self._selector.unregister(guard.listener)
            guard.close()
        self._guards.clear()

    def _end_calls(self) -> None:
        """From now on, a connection that comes to a guard is reset."""
        self._answering.end()
        for guard in self._guards.values():
            guard.answer = None

    def _may_reach(self, address: Address) -> bool:
        if address in self._met or address in self._own_scoped:
            return True
        return any(address in network for network in (*self._own, *self._allowed))

    def _attach(self) -> None:
        plain = [address for address in self._met if not _is_scoped(address)]
        scoped = [*self._own_scoped, *(each for each in self._met if _is_scoped(each) and each.scope_id)]
        try:
            program = compile_filter([*self._own, *self._allowed, *map(ipaddress.ip_network, plain)], scoped)
        except TooManyError as error:
            self._open(f"too many addresses: {error}")
            return
        for guard in self._guards.values():
            attach_filter(guard.listener, program)

    def _open(self, why: str) -> None:
        """Gives up the guards, or the attempt if they are required."""
        tasks = [*self._guards]
        for guard in self._guards.values():
            attach_filter(guard.listener, NOBODY if self._required else compile_filter(ALL))
        if self._required:
            self._send(Refused(render_unguarded(dict.fromkeys(tasks, why))))
        else:
            for task in tasks:
                self._send(Unguarded(task, why))


class _Guard:
    """The guard of one port; `answer` takes callers while the nodes are checked."""

    def __init__(
        self,
        task: str,
        listener: socket.socket,
        may_reach: Callable[[Address], bool],
        answer: Optional[Callable[[socket.socket, Address], None]],
    ) -> None:
        self.task = task
        self.listener = listener
        self.answer = answer
        self._accepting = Listener(listener)
        self._may_reach = may_reach
        self._unknown: dict[str, tuple[float, int]] = {}
        """When each unknown peer first called, and how often since; -1 once it was reported."""

    def accept(self, probe: Optional[tuple[str, int]] = None) -> bool:
        """Accepts connections that the filter has directed to the guard; returns whether `probe` was one of them."""
        found = False
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted = self._accepting.accept()
            except OSError:
                break
            if accepted is None:
                break
            caller, peer = accepted
            address = _peer_address(peer)
            if probe is not None and peer[1] == probe[1] and address.is_loopback:
                found = True
                _reset(caller)
            elif self.answer is not None:
                self.answer(caller, address)
            else:
                self._refuse(caller, address)
        return found

    def is_joined(self, port: int) -> bool:
        """Whether the task listens: our own connection then reaches the task, and otherwise the guard."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as caller:
            caller.settimeout(0.2)
            if caller.connect_ex(("127.0.0.1", port)) != 0:
                return False
            return not self.accept(caller.getsockname())

    def take_unknown(self, now: float) -> list[tuple[str, int]]:
        """Returns the unknown peers that were counted for long enough, with their counts."""
        due = [(name, count) for name, (since, count) in self._unknown.items() if count > 0 and now - since > SETTLE_S]
        for name, _ in due:
            self._unknown[name] = (0.0, -1)
        return due

    def close(self) -> None:
        """Ends the guard; the caller closes its listener."""
        self._accepting.release()

    def _refuse(self, caller: socket.socket, address: Address) -> None:
        _reset(caller)
        name = str(address)
        if self._may_reach(address):  # a peer that is early: TensorFlow does not listen yet
            return
        if name not in self._unknown and len(self._unknown) >= ADDRESSES:
            name = "other addresses"
        since, count = self._unknown.get(name, (time.monotonic(), 0))
        if count >= 0:
            self._unknown[name] = (since, count + 1)


def _is_scoped(address: Address) -> TypeGuard[ipaddress.IPv6Address]:
    """Whether the address means something on one interface only."""
    return isinstance(address, ipaddress.IPv6Address) and address.is_link_local


def _address(text: str) -> Address:
    """The address of a machine; a link-local one has the index of its interface here as its scope.

    Raises:
        ValueError: the text is a name, or a link-local address of an interface that does not exist here.
    """
    plain, _, scope = text.partition("%")
    address = ipaddress.ip_address(plain)
    if isinstance(address, ipaddress.IPv4Address) or not address.is_link_local or not scope:
        return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
    try:
        index = int(scope) if scope.isdigit() else socket.if_nametoindex(scope)
    except OSError:
        raise ValueError(f"there is no interface {scope}") from None
    return ipaddress.IPv6Address(f"{plain}%{index}")


def _peer_address(peer: Sequence[Any]) -> Address:
    """The address of a connection's other end."""
    plain = str(peer[0]).partition("%")[0]
    return _address(f"{plain}%{peer[3]}" if len(peer) > 3 and peer[3] else plain)


def _reset(caller: socket.socket) -> None:
    with contextlib.suppress(OSError):
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    caller.close()
