"""Carries the tasks' connections to and from the other nodes, encrypted; a separate process in the tasks' network.

Each node of the cluster has a loopback address in that network. A connection to a task of another node at that address
is forwarded over TLS to the same port of the node outside. A connection from outside is forwarded to the task that has
the port. Both sides present the attempt's certificate, which no other program has. All nodes have the same certificate,
and TLS does not protect the port. So the first line inside TLS names the task: a man in the middle cannot redirect a
connection to another task.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Optional

from worker_entry.agent.checks.port_responder import listen
from worker_entry.agent.helpers.works import RESOLVE
from worker_entry.agent.network.outer import ask_for_socket, begin_work
from worker_entry.protocol.frozen import dataclass
from worker_entry.system.network import Network
from worker_entry.system.ports import BACKLOG

HANDSHAKE_S = 10.0
CONNECT_S = 10.0
TASK_S = 20.0
"""How long a connection from another node waits for a task that does not listen yet, as TensorFlow's peers wait."""
TASK_PAUSE_S = 0.02
PIECE = 256 << 10

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class OuterSockets(Network):
    """Sockets of the machine's network."""

    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking

    def make_socket(self, family: int, kind: int = socket.SOCK_STREAM, protocol: int = 0) -> socket.socket:
        return ask_for_socket(self._asking, family, kind, protocol)

    def resolve(self, names: Sequence[str]) -> dict[str, list[str]]:
        """The addresses of each name."""
        reading, writing = os.pipe()
        begin_work(self._asking, RESOLVE, json.dumps(names).encode(), writing)
        os.close(writing)
        with open(reading, "rb") as stream:
            found: dict[str, list[str]] = json.loads(stream.read() or b"{}")
        return found


@dataclass(frozen=True)
class Peer:
    """The task `task` of another node: `addresses` of the node outside, known to the user as `host`."""

    task: str
    host: str
    addresses: Sequence[str]
    port: int


class TunnelServer:
    """Passes connections on, in both directions; `agent` gets notes."""

    def __init__(self, outer: OuterSockets, server: ssl.SSLContext, client: ssl.SSLContext, agent: Agent) -> None:
        self._outer = outer
        self._server = server
        self._client = client
        self._agent = agent
        self._noted: set[str] = set()

    async def let_in(self, task: str, port: int) -> None:
        """Listens outside for this task, which has the same port inside.

        Raises:
            OSError: it cannot listen.
        """
        listener = listen(port, self._outer)
        await asyncio.start_server(
            functools.partial(self._from_outside, task, port),
            sock=listener,
            ssl=self._server,
            ssl_handshake_timeout=HANDSHAKE_S,
            backlog=BACKLOG,
            limit=PIECE,
        )

    async def let_out(self, address: str, peer: Peer) -> None:
        """Listens inside for connections to a task of another node.

        Raises:
            OSError: it cannot listen.
        """
        listener = socket.socket(socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # a task of this node may have the same port
        listener.bind((address, peer.port))
        handler = functools.partial(self._from_inside, peer)
        await asyncio.start_server(handler, sock=listener, backlog=BACKLOG, limit=PIECE)

    async def _from_inside(self, peer: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outside = await self._reach(peer)
        if outside is None:
            writer.transport.abort()
        else:
            await _join((reader, writer), outside)

    async def _from_outside(
        self, task: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not await self._is_for(task, port, reader):
            writer.transport.abort()
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TASK_S
        while not reader.at_eof():
            try:
                inside = await asyncio.open_connection("127.0.0.1", port, limit=PIECE)
            except OSError:
                if loop.time() > deadline:
                    break
                await asyncio.sleep(TASK_PAUSE_S)
            else:
                await _join((reader, writer), inside)
                return
        writer.transport.abort()

    async def _is_for(self, task: str, port: int, reader: asyncio.StreamReader) -> bool:
        """Whether the other side means this task; notes if it does not."""
        try:
            line = await asyncio.wait_for(reader.readuntil(b"\n"), HANDSHAKE_S)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            return False
        if line != _make_first_line(task, port) and task not in self._noted:
            self._noted.add(task)
            self._agent.say(note=f"the tunnel has refused a connection to another task that came to {task}")
        return line == _make_first_line(task, port)

    async def _reach(self, peer: Peer) -> Optional[Streams]:
        """A connection to the other node's tunnel; None if there is none now. The task may try again."""
        why: Optional[BaseException] = None
        for address in peer.addresses:
            try:
                return await asyncio.wait_for(self._connect(address, peer), CONNECT_S)
            except ConnectionError:  # the tunnel there does not listen yet, or no longer listens
                continue
            except (OSError, asyncio.TimeoutError) as error:  # ssl.SSLError is an OSError
                why = error
        if why is not None and peer.host not in self._noted:
            self._noted.add(peer.host)
            reason = getattr(why, "strerror", None) or str(why) or "no answer"
            self._agent.say(note=f"the tunnel cannot reach {peer.host}: {reason}")
        return None

    async def _connect(self, address: str, peer: Peer) -> Streams:
        outside = self._outer.make_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            outside.setblocking(False)
            await asyncio.get_running_loop().sock_connect(outside, (address, peer.port))
            streams = await asyncio.open_connection(
                sock=outside, ssl=self._client, server_hostname="", ssl_handshake_timeout=HANDSHAKE_S, limit=PIECE
            )
        except BaseException:
            outside.close()
            raise
        streams[1].write(_make_first_line(peer.task, peer.port))
        return streams


def _make_first_line(task: str, port: int) -> bytes:
    return f"{task} {port}\n".encode()


class Agent:
    """The connection to the agent; it ends with the agent."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def say(self, **fields: Any) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(fields).encode() + b"\n")

    async def wait(self) -> None:
        """Returns when the agent is gone."""
        self._control.setblocking(False)
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self._control, 4096):
                pass


def serve() -> None:
    """Serves until the agent ends."""
    control = socket.socket(fileno=os.dup(0))
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    with control.makefile("rb") as stream:
        config = json.loads(stream.readline())
    asyncio.run(_serve(config, OuterSockets(socket.socket(fileno=descriptors[0])), Agent(control)))


async def _serve(config: dict[str, Any], outer: OuterSockets, agent: Agent) -> None:
    try:
        contexts = [
            make_context(purpose, config["certificate"], config["key"])
            for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        ]
        server = TunnelServer(outer, contexts[0], contexts[1], agent)
        addresses = outer.resolve(sorted({host for *_, host in config["peers"]}))
        for task, port in config["ports"].items():
            await server.let_in(task, port)
        for task, inside, port, host in config["peers"]:
            await server.let_out(inside, Peer(task, host, addresses.get(host, []), port))
    except OSError as error:
        agent.say(problem=error.strerror or str(error))
        return
    agent.say(problem="")
    await agent.wait()


def make_context(purpose: int, certificate: str, key: str) -> ssl.SSLContext:
    """A context that trusts only this certificate, and shows it.

    Raises:
        OSError: these are not a certificate and its key.
    """
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a node has no name that all others know: the certificate alone counts
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    memory = os.memfd_create("key")  # OpenSSL reads files only; this one is on no disk
    try:
        os.write(memory, f"{certificate}\n{key}".encode())
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    return context


async def _join(one: Streams, other: Streams) -> None:
    """Copies data in both directions, until one side ends."""
    ways = [asyncio.ensure_future(_pass_on(a[0], b[1])) for a, b in ((one, other), (other, one))]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()
    for _, writer in (one, other):
        writer.close()  # after it has sent the remaining data


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(PIECE):
            writer.write(data)
            await writer.drain()
