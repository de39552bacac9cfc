"""The chief of ParameterServerStrategy connects to its servers only when they listen, and no guard resets it."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from worker_entry.hooks import served_ports

RESETS = 3
"""How often a port is not served yet."""


def reset(caller: socket.socket) -> None:
    """Closes a connection as the guard of a port does."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()


def greet(caller: socket.socket) -> None:
    with caller:
        caller.sendall(b"\x00")


@contextlib.contextmanager
def answered(*answers: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[socket.socket]]]:
    """A port that gives each connection the next of the answers; yields its address, and the connections so far."""
    callers: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                caller, _ = listener.accept()
                callers.append(caller)
                answer(caller)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", callers
        finally:
            thread.join()
            for caller in callers:
                caller.close()


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class like TensorFlow's strategy, with the hook."""

    class ParameterServerStrategyV2:
        def __init__(self, jobs: dict[str, list[str]]) -> None:
            self._cluster_resolver = SimpleNamespace(cluster_spec=lambda: SimpleNamespace(as_dict=lambda: jobs))
            self.connected = self._connect_to_cluster("chief")

        def _connect_to_cluster(self, coordinator_name: str) -> str:
            return f"connected as {coordinator_name}"

    module = ModuleType(served_ports.STRATEGY)
    vars(module)["ParameterServerStrategyV2"] = ParameterServerStrategyV2
    monkeypatch.setitem(sys.modules, served_ports.STRATEGY, module)
    served_ports.install()
    return ParameterServerStrategyV2


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_the_chief_connects_when_no_server_resets_connections_any_more(strategy: Any, job: str) -> None:
    with answered(greet) as (early, _), answered(*[reset] * RESETS, greet) as (late, callers):
        assert strategy({job: [early, late], "chief": ["127.0.0.1:1"]}).connected == "connected as chief"
        assert len(callers) == RESETS + 1


def test_a_port_that_refuses_or_resets_or_closes_connections_is_not_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        refusing = f"127.0.0.1:{listener.getsockname()[1]}"
    assert not served_ports.is_served(refusing)
    with answered(reset, socket.socket.close) as (address, _):
        assert not served_ports.is_served(address)
        assert not served_ports.is_served(address)


def test_a_server_that_waits_for_its_client_to_speak_first_counts_as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_ports, "SILENCE_S", 0.1)
    with answered(lambda _: None) as (address, _):
        assert served_ports.is_served(address)


def test_the_addresses_of_servers_may_be_names_or_ipv6_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        called.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    assert not any(map(served_ports.is_served, ["[::1]:2222", "gpu-a:2223"]))
    assert called == [("::1", 2222), ("gpu-a", 2223)]
