"""Keeps strangers from the tasks' ports: TensorFlow's server would run whatever anybody asks it to.

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
from collections.abc import Callable, Iterable
from typing import Optional, Union

from worker_entry.agent.checks.calls import find_mode, is_proof, make_greeting
from worker_entry.agent.checks.works import RESOLVE
from worker_entry.agent.child_work import ChildWork
from worker_entry.agent.isolation.outer_network import OuterNetwork
from worker_entry.protocol.messages import Refused
from worker_entry.protocol.strangers import Repelled, Unguarded
from worker_entry.system.address_filter import Network, TooManyError, compile_filter
from worker_entry.system.interfaces import Address, own_addresses
from worker_entry.system.network import HERE
from worker_entry.system.ports import NOBODY, HeldPorts, attach_filter, has_ipv4_listener, render_unguarded

LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1"))
ALL: tuple[Network, ...] = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0"))
ACCEPTED_AT_ONCE = 64
CALLERS = 256
"""Callers that may wait to be answered at the same time."""
ADDRESSES = 100
"""Strangers that are counted separately for each port."""
SETTLE_S = 1.0
"""How long the connections of a stranger are counted before they are reported."""
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
        send: Callable[[Union[Repelled, Unguarded, Refused]], None],
        serve: Callable[[socket.socket, str], None],
    ) -> None:
        self.outer: Optional[OuterNetwork] = None
        """Where the ports are held, if not in this process's network."""
        self._selector = selector
        self._send = send
        self._serve = serve
        self._guards: dict[str, _Guard] = {}
        self._own: list[Network] = []
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
            nonce: proves that a caller belongs to the cluster; empty if nobody will call.
            required: whether the node refuses to go on if a guard has to be given up.
        """
        self.end()
        self._required = required
        self._own = [*LOOPBACK, *map(ipaddress.ip_network, own_addresses(self.outer or HERE))]
        self._allowed = [ipaddress.ip_network(network, strict=False) for network in allowed]
        for task, listener in ports.guarded.items():
            call = _Calls(self._selector, nonce, self._met.add, self._serve) if nonce else None
            self._guards[task] = guard = _Guard(task, listener, self._may_reach, call)
            self._selector.register(listener, selectors.EVENT_READ, guard.accept)
        self._attach()
        if self.outer is None:  # in another network, a plain connection shows whether a task listens
            ports.probe = self.is_joined

    def learn(self, hosts: Iterable[str]) -> None:
        """Lets the cluster's machines, by name or address, reach the ports; calls are no longer answered."""
        for guard in self._guards.values():
            guard.end_calls()
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
        """Whether all names of the cluster are resolved, as far as they can be; `now`: monotonic seconds."""
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
        """Reports the strangers that have called; `now`: monotonic seconds."""
        for guard in self._guards.values():
            for address, count in guard.take_strangers(now):
                self._send(Repelled(guard.task, address, count))

    def end(self) -> None:
        """Removes the guards; the caller releases the ports."""
        self.poll(float("inf"))
        self._work.cancel()
        self._waits_until = 0.0
        for guard in self._guards.values():
            self._selector.unregister(guard.listener)
            guard.end_calls()
        self._guards.clear()

    def _may_reach(self, address: Address) -> bool:
        return address in self._met or any(address in network for network in (*self._own, *self._allowed))

    def _attach(self) -> None:
        networks = [*self._own, *self._allowed, *map(ipaddress.ip_network, self._met)]
        try:
            program = compile_filter(networks)
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
    """The guard of one port; `calls` answers callers while the nodes are checked."""

    def __init__(
        self, task: str, listener: socket.socket, may_reach: Callable[[Address], bool], calls: Optional[_Calls]
    ) -> None:
        self.task = task
        self.listener = listener
        self._may_reach = may_reach
        self._calls = calls
        self._strangers: dict[str, tuple[float, int]] = {}
        """When each stranger has first called, and how often since; -1 once it was reported."""

    def accept(self, probe: Optional[tuple[str, int]] = None) -> bool:
        """Takes all connections that the filter has left to the guard; returns whether `probe` was one of them."""
        found = False
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                caller, peer = self.listener.accept()
            except OSError:
                break
            address = _address(peer[0])
            if probe is not None and peer[1] == probe[1] and address.is_loopback:
                found = True
                _reset(caller)
            elif self._calls is None or not self._calls.take(self.task, caller, address):
                self._refuse(caller, address)
        return found

    def is_joined(self, port: int) -> bool:
        """Whether the task listens: a connection of our own then goes to it, and otherwise comes to the guard."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as caller:
            caller.settimeout(0.2)
            if caller.connect_ex(("127.0.0.1", port)) != 0:
                return False
            return not self.accept(caller.getsockname())

    def take_strangers(self, now: float) -> list[tuple[str, int]]:
        """Those that were counted for long enough."""
        due = [
            (name, count) for name, (since, count) in self._strangers.items() if count > 0 and now - since > SETTLE_S
        ]
        for name, _ in due:
            self._strangers[name] = (0.0, -1)
        return due

    def end_calls(self) -> None:
        """From now on, a connection that comes to the guard is reset."""
        if self._calls is not None:
            self._calls.end()
        self._calls = None

    def _refuse(self, caller: socket.socket, address: Address) -> None:
        _reset(caller)
        name = str(address)
        if self._may_reach(address):  # a peer that is early: TensorFlow does not listen yet
            return
        if name not in self._strangers and len(self._strangers) >= ADDRESSES:
            name = "other addresses"
        since, count = self._strangers.get(name, (time.monotonic(), 0))
        if count >= 0:
            self._strangers[name] = (since, count + 1)


class _Calls:
    """Answers the callers of one port, and learns the addresses of the other nodes."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        nonce: str,
        meet: Callable[[Address], None],
        serve: Callable[[socket.socket, str], None],
    ) -> None:
        self._selector = selector
        self._serve = serve
        self._nonce = nonce
        self._meet = meet
        self._callers: set[socket.socket] = set()

    def take(self, task: str, caller: socket.socket, address: Address) -> bool:
        """Answers the caller; returns whether there was room for it."""
        if len(self._callers) >= CALLERS:
            return False
        caller.setblocking(False)

        def hear() -> None:
            proof = b""
            with contextlib.suppress(OSError):
                proof = caller.recv(256)
            if is_proof(proof, self._nonce, task):
                self._meet(address)
            mode = find_mode(self._nonce, task, proof)
            if mode is not None:
                self._serve(caller, mode)
            if (
                not proof or mode is not None
            ):  # the caller closes first: the kernel then keeps its end of the connection, not our port
                self._end(caller)

        self._callers.add(caller)
        self._selector.register(caller, selectors.EVENT_READ, hear)
        with contextlib.suppress(OSError):  # the caller is gone
            caller.send(make_greeting(self._nonce, task))
        return True

    def end(self) -> None:
        for caller in list(self._callers):
            self._end(caller)

    def _end(self, caller: socket.socket) -> None:
        self._callers.discard(caller)
        self._selector.unregister(caller)
        caller.close()


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def _reset(caller: socket.socket) -> None:
    with contextlib.suppress(OSError):
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    caller.close()
