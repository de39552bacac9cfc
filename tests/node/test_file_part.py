"""A part of a file reaches a pipe completely, even if the pipe accepts or the kernel sends little at once."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker_entry.system.files import COPIED, FilePart

CONTENT = random.Random(1).randbytes(3 * COPIED + 1)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def drain(reader: int) -> bytes:
    content = b""
    while True:
        try:
            piece = os.read(reader, 1 << 20)
        except BlockingIOError:
            return content
        content += piece


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_file_part_is_sent_completely_to_a_slow_reader(file: int, kind: str) -> None:
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = (end.detach() for end in socket.socketpair())
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    part = FilePart(file, 5, len(CONTENT) - 7)
    received = b""
    while part:
        try:
            sent = part.send(writer)
        except BlockingIOError:
            piece = drain(reader)
            assert piece  # otherwise the loop would never end
            received += piece
        else:
            assert sent > 0
    received += drain(reader)
    part.close()
    for descriptor in (reader, writer):
        os.close(descriptor)

    assert received == CONTENT[5:-2]


def test_a_file_part_keeps_its_length_when_the_file_is_truncated(file: int, tmp_path: Path) -> None:
    """The receiver already knows the length."""
    reader, writer = os.pipe()
    part = FilePart(file, 0, COPIED // 2)
    os.ftruncate(file, 10)
    while part:
        part.send(writer)
    assert os.read(reader, COPIED) == CONTENT[:10] + bytes(COPIED // 2 - 10)
    part.close()
    os.close(reader)
    os.close(writer)


def test_a_file_part_is_copied_where_sendfile_fails(file: int, tmp_path: Path) -> None:
    target = os.open(tmp_path / "target", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # `sendfile` refuses O_APPEND
    with pytest.raises(OSError, match="Invalid argument"):
        os.sendfile(target, file, 0, 1)
    part = FilePart(file, 1, len(CONTENT) - 1)
    while part:
        assert 0 < part.send(target) <= COPIED
    part.close()
    os.close(target)

    assert (tmp_path / "target").read_bytes() == CONTENT[1:]


def test_sending_a_file_part_to_a_closed_reader_raises(file: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    part = FilePart(file, 0, 10)
    with pytest.raises(BrokenPipeError):
        part.send(writer)
    assert bytes(part) == CONTENT[:10]
    part.close()
    os.close(writer)


def test_a_file_part_outlives_the_descriptor_that_it_was_created_from(file: int, tmp_path: Path) -> None:
    other = os.open(tmp_path / "file", os.O_RDONLY)
    part = FilePart(other, 0, 10)
    os.close(other)
    reader, writer = os.pipe()
    assert part.send(writer) == 10
    assert os.read(reader, 100) == CONTENT[:10]
    part.close()
    for descriptor in (reader, writer):
        os.close(descriptor)
