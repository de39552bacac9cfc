"""Unknown peers do not reach a task's port; tasks of the cluster do, and nothing else changes for its server."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness.apart import apart_on_linux
from tests.harness.hosts.own_network import call, enter_own_network
from tests.harness.polling import eventually
from tests.harness.witness import wait_until
from worker_entry.agent.checks.answering import CALLERS_OF_ADDRESS, PROOF_S
from worker_entry.agent.checks.calls import make_call
from worker_entry.agent.port_guards import PortGuards, _address
from worker_entry.protocol.messages import ConnectionsRejected, Refused, Unguarded
from worker_entry.protocol.values import Program, TaskRequest
from worker_entry.system.address_filter import LIMIT, Network, TooManyError, compile_filter
from worker_entry.system.network import own_addresses
from worker_entry.system.ports import HeldPorts, attach_filter

STRANGER, PEER = "10.0.0.99", "10.0.0.2"


# --- the filter ---


def _network(text: str) -> Network:
    return ipaddress.ip_network(text)


@contextlib.contextmanager
def _shared_port(networks: Sequence[Network]) -> Iterator[tuple[int, socket.socket, socket.socket]]:
    """A port with a guard and a server behind the filter."""
    with _dual() as guard, _dual() as server:
        guard.bind(("::", 0))
        guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        attach_filter(guard, compile_filter(networks))
        guard.listen(64)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("::", guard.getsockname()[1]))
        server.listen(64)
        for each in (guard, server):
            each.setblocking(False)
        yield guard.getsockname()[1], guard, server


def _dual() -> socket.socket:
    both = socket.socket(socket.AF_INET6)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return both


def _takes(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _some_networks(chance: random.Random, count: int) -> list[Network]:
    """Networks as in clusters: addresses of a few networks, some prefixes, some of IPv6, some mapped."""
    bases4 = [chance.getrandbits(32) for _ in range(3)]
    bases6 = [(0x2001 << 112) | (chance.getrandbits(112)) for _ in range(3)]
    found: list[Network] = []
    for _ in range(count):
        pick = chance.random()
        if pick < 0.45:
            found.append(ipaddress.IPv4Network(chance.choice(bases4) ^ chance.getrandbits(chance.choice((4, 8, 20)))))
        elif pick < 0.8:
            found.append(ipaddress.IPv6Network(chance.choice(bases6) ^ chance.getrandbits(chance.choice((8, 40, 64)))))
        elif pick < 0.85:
            found.append(ipaddress.IPv6Network((0xFFFF << 32) | (chance.choice(bases4) ^ chance.getrandbits(10))))
        elif pick < 0.95:
            length = chance.randint(8, 32)
            found.append(ipaddress.IPv4Network((chance.getrandbits(32), length), strict=False))
        else:
            length = chance.randint(16, 128)
            found.append(ipaddress.IPv6Network((chance.choice(bases6) ^ chance.getrandbits(64), length), strict=False))
    return found


def _unmapped(network: Network) -> Network:
    mapped = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    return network if mapped is None else ipaddress.IPv4Network((int(mapped), network.prefixlen - 96))


def _near(chance: random.Random, networks: Sequence[Network]) -> str | None:
    """A source address inside one of the networks, just outside, or one bit away; None if no host can have it."""
    network = _unmapped(chance.choice(networks))
    kind = ipaddress.IPv4Address if network.version == 4 else ipaddress.IPv6Address
    bits = network.max_prefixlen
    first, last = int(network.network_address), int(network.broadcast_address)
    number = chance.choice(
        (first, last, first - 1, last + 1, chance.randint(first, last), first ^ (1 << chance.randrange(bits)))
    )
    address = kind(number % (1 << bits))
    unusable = address.is_unspecified or address.is_multicast or address.is_loopback or address.is_link_local
    if unusable or (address.version == 4 and (address.is_reserved or int(address) >> 24 == 0)):
        return None
    return None if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped else str(address)


@apart_on_linux
def test_an_address_filter_accepts_exactly_the_addresses_of_its_networks() -> None:
    enter_own_network()
    chance = random.Random(19)
    decided = [0, 0]
    for count in (1, 2, 3, 7, 30, 100, 300, 1000):
        networks = _some_networks(chance, count)
        assert len(compile_filter(networks)) // 8 <= LIMIT
        model = [_unmapped(network) for network in networks]
        with _shared_port(networks) as (port, guard, server):
            for source in filter(None, (_near(chance, networks) for _ in range(250))):
                allowed = any(ipaddress.ip_address(source) in network for network in model)
                call(source, port).close()
                assert (_takes(server), _takes(guard)) == (allowed, not allowed), (source, networks)
                decided[allowed] += 1
    assert min(decided) > 300


def test_an_address_filter_with_too_many_addresses_is_an_error() -> None:
    chance = random.Random(1)
    with pytest.raises(TooManyError, match="4,096"):
        compile_filter([ipaddress.IPv6Network(chance.getrandbits(128)) for _ in range(1000)])


@pytest.mark.parametrize(("networks", "most"), [([], 8), ([_network("0.0.0.0/0"), _network("::/0")], 8)])
def test_an_address_filter_for_few_networks_is_short(networks: list[Network], most: int) -> None:
    assert len(compile_filter(networks)) // 8 <= most


@apart_on_linux
def test_an_unprivileged_user_can_attach_an_address_filter() -> None:
    if os.geteuid() == 0:
        os.setuid(65534)
    with _shared_port([_network("127.0.0.1")]) as (port, guard, server):
        for source, allowed in (("127.0.0.1", True), ("127.0.0.5", False)) * 20:
            with call(source, port):
                assert (_takes(server), _takes(guard)) == (allowed, not allowed)


@apart_on_linux
def test_own_addresses_returns_the_addresses_of_all_interfaces() -> None:
    import subprocess

    from tests.harness.hosts.namespaces import IP

    enter_own_network()
    assert {*map(str, own_addresses())} == {"127.0.0.1", "::1"}
    for number in range(200):
        subprocess.run([IP, "address", "add", f"10.3.{number}.1/24", "dev", "lo"], check=True)
    subprocess.run([IP, "address", "add", "fd00:3::1/64", "dev", "lo"], check=True)
    found = {*map(str, own_addresses())}
    assert {"127.0.0.1", "::1", "fd00:3::1"} | {f"10.3.{number}.1" for number in range(200)} == found


# --- the guard ---


@dataclass
class _Node:
    """A node's guards, and the loop of its agent."""

    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    ports: HeldPorts = field(default_factory=HeldPorts)
    said: list[ConnectionsRejected | Unguarded | Refused] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.guards = PortGuards(self.selector, self.said.append, lambda _connection, _mode: None)

    def hold(self, *allowed: str, nonce: str = "", required: bool = False) -> int:
        self.guards.end()
        self.ports.release()
        assert self.ports.hold([TaskRequest("worker:0", Program("command", "true"))], 20000, 20999) == []
        self.guards.begin(self.ports, allowed, nonce, required=required)
        return self.ports.numbers["worker:0"]

    def turn(self) -> None:
        for key, _ in self.selector.select(0.01):
            key.data()
        self.guards.poll(time.monotonic())

    def hears(self, caller: socket.socket) -> bytes | None:
        """The bytes that a caller receives before its connection ends; None if it is reset."""
        heard = b""
        caller.setblocking(False)
        for _ in range(200):
            self.turn()
            try:
                data = caller.recv(100)
            except BlockingIOError:
                if heard:
                    return heard
                continue
            except ConnectionResetError:
                return None
            heard += data
            if not data:
                return heard
        raise AssertionError("the connection stays open in silence")

    def greets(self, caller: socket.socket) -> str:
        """The challenge that a caller receives."""
        greeting = self.hears(caller)
        assert greeting is not None
        name, challenge = greeting.decode().split()
        assert name == "distlaunch"
        return challenge

    def serve(self) -> socket.socket:
        """A server that binds its port as gRPC does."""
        server = _dual()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("::", self.ports.numbers["worker:0"]))
        server.listen(64)
        server.setblocking(False)
        return server


@apart_on_linux
def test_an_unknown_peer_is_reset_in_every_phase_and_reported_once() -> None:
    enter_own_network()
    node = _Node()
    port = node.hold()
    node.guards.learn([PEER, "fd00::2"])
    assert node.hears(call(STRANGER, port)) is None  # held
    assert node.hears(call(PEER, port)) is None  # a peer that connects too early
    with node.serve() as server:
        for source in (STRANGER, "fd00::99"):
            assert node.hears(call(source, port)) is None
            assert not _takes(server)
        for source in (PEER, "fd00::2", "127.0.0.1", "::1"):
            with call(source, port):
                assert _takes(server)
        assert node.guards.is_joined("worker:0", port)
    assert not node.guards.is_joined("worker:0", port)
    assert node.hears(call(STRANGER, port)) is None  # the server has gone

    def told() -> None:
        node.turn()
        assert [said for said in node.said if isinstance(said, ConnectionsRejected)] == [
            ConnectionsRejected("worker:0", STRANGER, 3),
            ConnectionsRejected("worker:0", "fd00::99", 1),
        ]

    eventually(told)
    assert node.hears(call(STRANGER, port)) is None
    node.guards.end()
    told()


@apart_on_linux
def test_only_known_peers_reach_a_server_that_restarts_or_listens_several_times() -> None:
    enter_own_network()
    node = _Node()
    port = node.hold()
    node.guards.learn([PEER])
    for _ in range(3):
        assert not node.guards.is_joined("worker:0", port)
        servers = [node.serve() for _ in range(3)]
        for _ in range(20):
            with call(PEER, port):
                assert sum(map(_takes, servers)) == 1
            assert node.hears(call(STRANGER, port)) is None
        servers.pop(0).close()  # the others stay
        with call(PEER, port):
            assert sum(map(_takes, servers)) == 1
        assert node.hears(call(STRANGER, port)) is None
        for server in servers:
            server.close()


@apart_on_linux
def test_a_peer_that_passes_the_check_reaches_the_port_from_then_on() -> None:
    enter_own_network()
    node = _Node()
    for nonce in ("one", ""):  # the second attempt has no checks
        port = node.hold(nonce=nonce)
        if nonce:
            for source, known in ((PEER, nonce), (STRANGER, "two")):
                caller = call(source, port)
                challenge = node.greets(caller)
                caller.sendall(make_call(known, "worker:0", challenge, "c"))
                assert (node.hears(caller) is None) == (known != nonce)
                caller.close()
                node.turn()
        node.guards.learn(["192.0.2.1"])
        with node.serve() as server:
            for source, allowed in ((PEER, True), (STRANGER, False), ("192.0.2.1", True)):
                with call(source, port):
                    assert _takes(server) == allowed, source


@apart_on_linux
def test_a_proof_of_a_peer_is_valid_for_one_connection_and_once() -> None:
    """An attacker who can read the network sees proofs, and may connect from another address."""
    enter_own_network()
    node = _Node()
    port = node.hold(nonce="one")
    honest = call(PEER, port)
    proof = make_call("one", "worker:0", node.greets(honest), "c")
    replaying = call(STRANGER, port)
    assert node.greets(replaying)
    replaying.sendall(proof)
    assert node.hears(replaying) is None
    guessing = call(STRANGER, port)
    challenge = node.greets(guessing)
    guessing.sendall(make_call("two", "worker:0", challenge, "c"))
    with contextlib.suppress(OSError):
        guessing.sendall(make_call("one", "worker:0", challenge, "c"))
    assert not node.hears(guessing)
    honest.sendall(proof)
    assert len(node.hears(honest) or b"") == 65
    assert {*map(str, node.guards._met)} == {PEER}


@apart_on_linux
def test_silent_callers_do_not_block_other_peers_and_are_closed_after_a_deadline() -> None:
    enter_own_network()
    node = _Node()
    port = node.hold(nonce="one")
    silent = []
    for _ in range(3 * CALLERS_OF_ADDRESS):
        silent.append(call(STRANGER, port))
        node.turn()
    caller = call(PEER, port)
    caller.sendall(make_call("one", "worker:0", node.greets(caller), "c"))
    assert len(node.hears(caller) or b"") == 65
    assert len(node.guards._answering._open) == CALLERS_OF_ADDRESS + 1
    node.guards.poll(time.monotonic() + PROOF_S + 1)
    assert len(node.guards._answering._open) == 1  # the caller with a proof


@apart_on_linux
def test_a_port_guard_survives_a_lack_of_file_descriptors() -> None:
    import resource

    enter_own_network()
    node = _Node()
    port = node.hold(nonce="one")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers = [call(STRANGER, port) for _ in range(5)]
    taken = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken.fileno() + 1, limits[1]))
    for _ in range(10):
        node.turn()  # each waiting connection is closed, so this ends
    assert node.selector.select(0.01) == []
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    caller = call(PEER, port)
    assert node.greets(caller)
    for each in (taken, *callers):
        each.close()


CALL = """
import socket, sys
interface, port = sys.argv[1], int(sys.argv[2])
with socket.socket(socket.AF_INET6) as caller:
    caller.settimeout(10)
    caller.bind(("fe80::99", 0, 0, socket.if_nametoindex(interface)))
    try:
        caller.connect(("fe80::1", port, 0, socket.if_nametoindex(interface)))
        print(caller.recv(10).decode())
    except ConnectionResetError:
        print("reset")
"""


@apart_on_linux
def test_a_link_local_peer_is_accepted_on_its_own_interface_only() -> None:
    """Another machine has the same address on two networks; two machines could have it as well."""
    import subprocess
    import threading

    from tests.harness.hosts.namespaces import IP

    enter_own_network()
    with subprocess.Popen(["unshare", "-n", "sleep", "600"]) as other:
        wait_until(
            lambda: Path(f"/proc/{other.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink(), "it has"
        )
        there = ["nsenter", "-t", str(other.pid), "-n"]
        for name in "ab":
            for command, where in (
                (f"link add {name}0 type veth peer name {name}1 netns {other.pid}", []),
                (f"address add fe80::1/64 dev {name}0 nodad", []),
                (f"link set {name}0 up", []),
                (f"address add fe80::99/64 dev {name}1 nodad", there),
                (f"link set {name}1 up", there),
            ):
                subprocess.run([*where, IP, *command.split()], check=True)
        node = _Node()
        port = node.hold()
        node.guards.learn(["fe80::99%a0"])
        with node.serve() as server:
            server.setblocking(True)

            def answer() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        server.accept()[0].sendall(b"served")

            threading.Thread(target=answer, daemon=True).start()
            for interface, expected in (("a1", "served"), ("b1", "reset"), ("a1", "served")):
                calling = subprocess.Popen(
                    [*there, sys.executable, "-c", CALL, interface, str(port)], stdout=subprocess.PIPE, text=True
                )
                while calling.poll() is None:
                    node.turn()
                assert calling.communicate()[0].strip() == expected, interface
            server.shutdown(socket.SHUT_RDWR)
        node.guards.end()
        repelled = f"fe80::99%{socket.if_nametoindex('b0')}"
        other.kill()
    assert {str(each.address) for each in node.said if isinstance(each, ConnectionsRejected)} == {repelled}


def test_a_link_local_address_of_an_unknown_interface_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no interface none"):
        _address("fe80::98%none")
    assert _address("fe80::98%1") == ipaddress.IPv6Address("fe80::98%1")
    assert _address("fd00::98%1") == ipaddress.IPv6Address("fd00::98")
    assert _address("::ffff:10.0.0.1") == ipaddress.IPv4Address("10.0.0.1")


@apart_on_linux
def test_networks_of_the_spec_reach_the_port_despite_an_unresolvable_cluster_name() -> None:
    enter_own_network()
    node = _Node()
    port = node.hold("10.9.0.0/16", "fd09::/16")
    node.guards.learn(["localhost", "a-name-that-nobody-has.invalid"])

    def is_settled() -> None:
        node.turn()
        assert node.guards.settled(time.monotonic())

    eventually(is_settled)
    _, status = os.wait()  # the process that resolved the names has answered, but may not have exited yet
    assert status == 0
    with node.serve() as server:
        for source, allowed in (("10.9.3.4", True), ("fd09::7", True), (STRANGER, False)):
            with call(source, port):
                assert _takes(server) == allowed, source


@apart_on_linux
def test_too_many_peer_addresses_open_the_port_unless_guards_are_required() -> None:
    enter_own_network()
    chance = random.Random(1)
    many = [str(ipaddress.IPv6Address(chance.getrandbits(128))) for _ in range(1000)]
    for required in (False, True):
        node = _Node()
        port = node.hold(*many, required=required)
        with node.serve() as server, call(STRANGER, port):
            assert _takes(server) != required
        [said] = node.said
        assert isinstance(said, Refused if required else Unguarded)
        assert "too many addresses" in str(said)
        node.guards.end()
        node.ports.release()


@apart_on_linux
def test_rejected_connections_of_very_many_unknown_peers_are_counted_together() -> None:
    enter_own_network()
    node = _Node()
    port = node.hold()
    for number in range(300):
        assert node.hears(call(f"10.1.{number // 200}.{number % 200 + 1}", port)) is None
    node.guards.end()
    counts = {said.address: said.count for said in node.said if isinstance(said, ConnectionsRejected)}
    assert len(counts) == 101
    assert counts["other addresses"] == 200


@apart_on_linux
def test_a_server_that_listens_on_ipv4_only_is_reported_as_unguarded() -> None:
    enter_own_network()
    node = _Node()
    port = node.hold()
    assert not node.guards.is_joined("worker:0", port)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("", port))
        server.listen()
        call(STRANGER, port).close()
        assert server.accept()[1][0] == STRANGER  # the kernel prefers this server
        server.setblocking(False)
        assert node.guards.is_joined("worker:0", port)
    assert node.said == [Unguarded("worker:0", "its program listens on IPv4 alone")]


@apart_on_linux
def test_without_ipv6_a_port_guard_works_on_ipv4() -> None:
    enter_own_network()
    Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    node = _Node()
    port = node.hold()
    node.guards.learn([PEER])
    assert node.hears(call(STRANGER, port)) is None
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("", port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("", port))
        server.listen()
        server.setblocking(False)
        for _ in range(20):
            with call(PEER, port):
                assert _takes(server)
            assert node.hears(call(STRANGER, port)) is None
            assert not _takes(server)
        assert node.guards.is_joined("worker:0", port)
    assert not node.guards.is_joined("worker:0", port)
    node.guards.end()
    assert node.said == [ConnectionsRejected("worker:0", STRANGER, 21)]
