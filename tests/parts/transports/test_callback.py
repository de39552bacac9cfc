"""The lines that an agent and its controller exchange before anything else on their connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.harness.polling import HANG_S
from worker_entry.bootstrap.callback import LINE_LIMIT, receive_line


class Counted(socket.socket):
    """Counts the calls of `recv`."""

    calls = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.calls += 1
        return super().recv(size, flags)


@pytest.fixture
def ends() -> Iterator[tuple[Counted, socket.socket]]:
    ours, theirs = socket.socketpair()
    with Counted(fileno=ours.detach()) as counted, theirs:
        counted.settimeout(HANG_S)
        yield counted, theirs


def test_a_line_is_read_without_what_follows_it(ends: tuple[Counted, socket.socket]) -> None:
    ours, theirs = ends
    text = '{"node": "' + "n" * 1000
    theirs.sendall(text.encode())
    read: list[dict[str, str]] = []
    thread = threading.Thread(target=lambda: read.append(receive_line(ours)))
    thread.start()
    theirs.sendall(b'"}\nbootstrap')
    thread.join(HANG_S)
    assert read == [{"node": "n" * 1000}]
    assert ours.calls < 10  # not one for each byte
    assert ours.recv(100) == b"bootstrap"


def test_a_connection_that_ends_within_a_line_is_an_error(ends: tuple[Counted, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(b'{"node": ')
    theirs.close()
    with pytest.raises(OSError, match="has ended"):
        receive_line(ours)


def test_a_line_without_an_end_is_an_error(ends: tuple[Counted, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(b" " * (LINE_LIMIT + 1))
    with pytest.raises(OSError, match="has ended"):
        receive_line(ours)
