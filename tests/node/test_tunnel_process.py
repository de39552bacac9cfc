"""A connection through the tunnel reaches only its own task, even if it is redirected in the network."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Coroutine
from typing import Any

import pytest

from launcher.controller.actions import make_tunnel_key
from tests.harness.hosts import loopback
from worker_entry.agent.network import tunnel_process
from worker_entry.agent.network.tunnel_process import Peer, TunnelServer, make_context
from worker_entry.system.network import HERE

COVERS = ("worker_entry/agent/network",)

KEY = make_tunnel_key()
SERVER, CLIENT = (
    make_context(purpose, KEY.certificate, KEY.key) for purpose in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
)


class Notes:
    """The tunnel's agent."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, **fields: Any) -> None:
        self.said.append(fields["note"])


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"task says " + await reader.readline())
    await writer.drain()
    writer.close()


async def talk(port: int, first: bytes) -> bytes:
    """The answer of a tunnel to a client with the key of the other nodes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=CLIENT, server_hostname="")
    writer.write(first)
    try:
        return await asyncio.wait_for(reader.read(100), 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_a_tunnel_connection_reaches_only_the_task_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_process, "HANDSHAKE_S", 1.0)
    notes = Notes()
    port = loopback.ports()[0]

    async def work() -> None:
        inside = await asyncio.start_server(echo, "127.0.0.1", 0)
        inner = inside.sockets[0].getsockname()[1]
        server = TunnelServer(HERE, SERVER, CLIENT, notes)  # type: ignore[arg-type]
        # A task has the same port inside and outside; here, the tunnel's connections to the task are redirected.
        await server.let_in("worker:1", port)
        monkeypatch.setattr(asyncio, "open_connection", redirected(port, inner))
        assert await talk(port, f"worker:1 {port}\nhello\n".encode()) == b"task says hello\n"
        for first in (
            f"worker:0 {port}\nhello\n",
            f"worker:1 {port + 1}\nhello\n",
            "\n",
            "x" * 300_000 + "\n",
            "hello",
        ):
            assert await talk(port, first.encode()) == b""
        inside.close()

    open_connection = asyncio.open_connection

    def redirected(outer: int, inner: int) -> Any:
        async def connect(host: str = "", at: int = 0, **options: Any) -> Any:
            to_task = at == outer and "ssl" not in options
            return await open_connection(host, inner if to_task else at, **options)

        return connect

    run(work())
    assert notes.said == ["the tunnel has refused a connection to another task that came to worker:1"]


def test_an_outgoing_tunnel_connection_names_its_task_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    port = loopback.ports()[0]

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readline())
        writer.write(await reader.readline())
        writer.close()

    async def work() -> None:
        address = loopback.address(77, 2)
        other = await asyncio.start_server(hear, "127.0.0.1", port, ssl=SERVER)
        server = TunnelServer(HERE, SERVER, CLIENT, Notes())  # type: ignore[arg-type]
        await server.let_out(address, Peer("worker:7", "gpu-b", ["127.0.0.1"], port))
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(b"hello\n")
        assert await reader.readline() == b"hello\n"
        writer.close()
        other.close()

    run(work())
    assert heard == [f"worker:7 {port}\n".encode()]
