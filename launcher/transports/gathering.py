"""One step of a Slurm job for the agents of all its nodes, which call the controller back.

A step for each node costs slurmctld a request, and this machine a process; above some number of nodes, one step starts
all agents, with the same stdin.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from launcher import helpers
from launcher.bounded_server import BoundedServer
from launcher.transports.base import LinkBroken, LinkError
from launcher.transports.connector import FIRST_S, Opening
from launcher.transports.payload import make_payload
from launcher.transports.programs import ProgramStream
from launcher.transports.streams import await_readable
from worker_entry.bootstrap.callback import AGENT, CALL_S, CONTROLLER, FAILED, prove, receive_line, send_line
from worker_entry.system.network import own_addresses

NODE_S = 0.5
"""How much each node adds to the time limit of the start."""
WAITING = 4096
"""Agents that may wait for their handshake."""
CALLS = 256
"""Handshakes that may run at the same time; behind a router, all agents may have the same address."""


class Gathering:
    """The agents that one step starts.

    Args:
        words: the command of the step, without that of the agents.
        environ: the environment of the step's program.
        hosts: the nodes.
        hear: gets the lines that the step's program writes to stderr; see ProgramConnector.
    """

    def __init__(
        self, words: Sequence[str], environ: dict[str, str], hosts: Sequence[str], hear: Callable[[str], bool]
    ) -> None:
        self._words = [*words]
        self._environ = environ
        self._hear = hear
        self._awaited = {*hosts}
        """The nodes whose first connection has not been taken yet."""
        self._uncalled = {*hosts}
        """The nodes whose agents have not called yet; the port is closed when there are none left."""
        self._server: BoundedServer | None = None
        self._extra_s = NODE_S * len(hosts)
        self._lock = threading.Lock()
        self._answered = {host: threading.Event() for host in hosts}
        """Set when the node's agent has called or failed, or the step has ended: each thread waits for its own."""
        self._called: dict[str, socket.socket] = {}
        self._secret = secrets.token_hex(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = ""
        """Why the step has ended, once it has."""
        self._failed: dict[str, str] = {}
        """The messages of agents that gave up, by node."""

    def wants(self, host: str) -> bool:
        """Whether the node's first connection has not been taken yet; returns True once."""
        with self._lock:
            is_first = host in self._awaited
            self._awaited.discard(host)
            return is_first

    def take(self, host: str, python: str, opening: Opening) -> SocketStream:
        """The connection that the node's agent has made; the first call starts the step.

        Raises:
            LinkError: the step cannot be started or has ended, or the agent does not call.
        """
        opening.begin()
        within_s = opening.within_s + self._extra_s
        deadline = time.monotonic() + within_s
        with self._lock:
            if self._process is None:
                self._begin(python, opening.note, within_s)
        while not self._answered[host].wait(0.5):
            if opening.cancelled.is_set():
                raise LinkError("the run ended before the agent called")
            if time.monotonic() > deadline:
                raise LinkError(f"the agent has not called within {within_s:g} s")
        with self._lock:
            if host not in self._called:
                raise LinkError(self._failed.get(host, self._ended))
            return SocketStream(self._called.pop(host), make_payload("node").archive)

    def _begin(self, python: str, note: Callable[[str], None], within_s: float) -> None:
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=WAITING)
        addresses = sorted(own_addresses(), key=lambda address: (address.is_loopback, address.is_link_local))
        order = {
            "addresses": [str(address) for address in addresses],
            "port": listener.getsockname()[1],
            "secret": self._secret,
            "within_s": within_s,
        }
        payload = make_payload("node", "callback")
        try:
            self._process = helpers.start(
                [*self._words, *payload.words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ,
                bufsize=0,
            )
        except OSError as error:
            listener.close()
            raise LinkError(f"{self._words[0]} cannot be started: {error.strerror}") from None
        stream = ProgramStream(self._process, self._words[0], note, self._listen)
        first = payload.opening(python) + json.dumps(order).encode() + b"\n"
        server = self._server = BoundedServer(
            listener, self._meet, name="gathering", limit=CALLS, per_address=CALLS, within_s=CALL_S
        )
        threading.Thread(target=self._watch, args=(stream, first, server), name="gathering", daemon=True).start()

    def _watch(self, stream: ProgramStream, first: bytes, server: BoundedServer) -> None:
        """Starts the agents, and waits for the end of the step. Output on stdout is an agent's error."""
        said = ""
        reason = "its step has ended"
        with contextlib.suppress(OSError):
            stream.write(first)
            stream.finish()
        try:
            while data := stream.read(1 << 16, 1e6):
                said = data.decode(errors="replace").strip().splitlines()[-1]
        except LinkBroken as broken:
            reason = str(broken)
        with self._lock:
            self._ended = f"{reason}: {said}" if said else reason
        for answered in self._answered.values():
            answered.set()
        server.close()

    def _listen(self, line: str) -> bool:
        node, _, reason = line.partition(": ")
        if reason.startswith(FAILED):
            with self._lock:
                self._failed[node] = reason
            self._tell(node)
        return self._hear(line)

    def _tell(self, node: str) -> None:
        """Wakes the thread that waits for the node, if it is one of ours."""
        answered = self._answered.get(node)
        if answered is not None:
            answered.set()

    def _meet(self, connection: socket.socket, note_proven: Callable[[], None]) -> None:
        """Admits an agent that knows the secret; any other peer only gets a challenge."""
        connection.settimeout(CALL_S)
        try:
            node = self._identify(connection)
        except (ValueError, KeyError):
            return
        note_proven()
        connection.settimeout(FIRST_S)
        payload = make_payload("node")
        send_line(connection, {"bootstrap": len(payload.bootstrap)})
        connection.sendall(payload.bootstrap)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._called[node] = socket.socket(fileno=connection.detach())
            self._uncalled.discard(node)
            is_over = not self._uncalled
        self._tell(node)
        if is_over and self._server is not None:
            self._server.close()

    def _identify(self, connection: socket.socket) -> str:
        """Returns the node of the agent at the other end; raises ValueError if the peer does not know the secret."""
        ours = secrets.token_hex(16)
        send_line(connection, {"nonce": ours})
        hello = receive_line(connection)
        node, theirs = str(hello["node"]), str(hello["nonce"])
        if not hmac.compare_digest(str(hello["proof"]), prove(self._secret, AGENT, node, theirs, ours)):
            raise ValueError("not an agent of ours")
        send_line(connection, {"proof": prove(self._secret, CONTROLLER, node, theirs, ours)})
        return node


class SocketStream:
    """An agent's connection."""

    def __init__(self, connection: socket.socket, archive: bytes) -> None:
        self.archive = archive
        self._connection = connection
        connection.setblocking(True)

    def read(self, size: int, timeout_s: float) -> bytes:
        try:
            if not await_readable(self._connection, timeout_s):
                raise LinkBroken(f"no data for {timeout_s:.0f} s")
            return self._connection.recv(size)
        except (OSError, ValueError) as error:
            raise LinkBroken(f"the connection broke: {error}") from None

    def write(self, data: bytes) -> None:
        self._connection.sendall(data)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes a reader and a writer
        self._connection.close()

    def how_ended(self) -> str:
        return "the agent ended"

    def exit_status(self) -> int | None:
        return None
