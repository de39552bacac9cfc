"""Work that an agent runs in child processes, because it may block on a name server, a network file system or a peer.

A piece of work has a name and takes bytes, so that a child of another process can do it as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from worker_entry.agent.checks.inspection import inspect
from worker_entry.agent.checks.port_responder import dial
from worker_entry.protocol.collection import FindFiles
from worker_entry.protocol.framing import Decoder, encode
from worker_entry.protocol.frozen import asdict
from worker_entry.protocol.messages import Message
from worker_entry.protocol.orders import Dial, Hello, Inspect
from worker_entry.protocol.speed import MeasureLink

INSPECT, DIAL, MEASURE_LINK, RESOLVE = "inspect", "dial", "measure-link", "resolve"
FIND_FILES, FIND_GPUS = "find-files", "find-gpus"


def perform(work: str, data: bytes) -> bytes:
    """Does the work.

    Args:
        work: INSPECT, DIAL, MEASURE_LINK, FIND_FILES, FIND_GPUS or RESOLVE.
        data: frames of Hello and Inspect or FindFiles; a frame of Dial or MeasureLink; in JSON, a list of names or,
            for FIND_GPUS, a list of GPUs and a list of the keys that this run has reserved.

    Returns:
        A frame of the answer; in JSON, the known addresses of each name, or FoundGpus.
    """
    if work == RESOLVE:
        return json.dumps({name: _resolve(name) for name in json.loads(data)}).encode()
    if work == FIND_GPUS:
        from worker_entry.system.gpu_holders import find_gpus

        return json.dumps(asdict(find_gpus(*json.loads(data)))).encode()
    return encode(_answer([message for message, _ in Decoder().feed(data)]))


def _answer(orders: list[Message]) -> Message:
    order = orders[-1]
    if isinstance(order, Dial):
        return dial(order)
    if isinstance(order, MeasureLink):
        from worker_entry.agent.checks.link_speed import measure_link

        return measure_link(order)
    hello = orders[0]
    assert isinstance(hello, Hello)
    if isinstance(order, FindFiles):
        from worker_entry.agent.files.finding import find_files

        return find_files(order, hello.cwd, os.path.dirname(hello.directory))
    assert isinstance(order, Inspect)
    return inspect(order, hello.cwd, hello.directory)


def _resolve(name: str) -> list[str]:
    """The addresses of this name, empty if it cannot be resolved here; may take a long time."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(_render(entry[4]) for entry in found))
    return []


def _render(address: tuple[Any, ...]) -> str:
    """A link-local address has its interface's index as its scope."""
    plain = str(address[0]).partition("%")[0]
    return f"{plain}%{address[3]}" if len(address) > 3 and address[3] else plain
