"""The attach process, which a new connection starts on a node: it hands its stdin and stdout to a running agent.

The attach process stays until the agent no longer needs the connection, because the connection ends with the process.
It writes nothing until the agent has taken the connection, so that the controller never mistakes it for an agent that
answers. It exits when the connection ends, or when the agent does not take the connection in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import time
from typing import Optional

from worker_entry.agent.connection.evidence import Fate, find_fate
from worker_entry.agent.connection.reattach_calls import KEPT, NOT_NEEDED, TAKEN
from worker_entry.agent.connection.reattach_folder import lock_file
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.messages import Broken, Message
from worker_entry.protocol.orders import AGENT_GONE, Attach
from worker_entry.protocol.values import Problem
from worker_entry.system.machine import process_view

TAKEN_S = 20.0
"""How long an attach process waits for the agent to take its connection."""
FIRST_FRAME_S = 60.0
POLL_S = 0.1
"""How often an attach process checks whether the agent's guardian has ended."""


def hand_over() -> int:
    """Reads Attach, hands over stdin and stdout, and waits for the agent's end; returns the agent's exit status."""
    message = receive()
    if not isinstance(message, Attach):
        return _refuse("protocol-error", "the node expected Attach")
    deadline = time.monotonic() + TAKEN_S
    if _has_hung_up():  # this process was delayed, and the agent may already use another connection
        return 1
    try:
        lock = os.open(lock_file(message.reattach_folder), os.O_RDWR)
    except OSError:
        return _report_fate(message)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        try:
            call.settimeout(TAKEN_S)
            call.connect(os.path.join(message.reattach_folder, "socket"))
            socket.send_fds(call, [encode(message)], [0, 1])
        except BlockingIOError:  # too many attach processes are waiting
            return 1
        except OSError:
            return _await_end(lock, deadline)
        word = _await_word(call, deadline)
        if word == b"":
            return _await_end(lock, deadline)
        if word != TAKEN:
            return 1
        call.settimeout(None)
        return _attend(call, lock)


def _report_fate(attach: Attach) -> int:
    """Answers a controller whose agent has no lock here; until its end is proven, the controller tries again."""
    fate = find_fate(attach.reattach_folder, attach.process_view, [attach.run_id] if attach.run_id else [])
    if fate is Fate.ENDED:
        return _refuse(AGENT_GONE, "its agent has ended")
    reason = "it will be made again" if fate is Fate.ALIVE else "nothing proves that its agent has ended"
    with contextlib.suppress(OSError):
        os.write(1, f"{attach.reattach_folder} is missing; {reason}\n".encode())
    return 1


def attend(call: socket.socket, reattach_folder: str) -> int:
    """Waits while the agent uses this process's connection; returns the exit status of the agent's work for the run."""
    try:
        lock: Optional[int] = os.open(lock_file(reattach_folder), os.O_RDWR)
    except OSError:  # it has ended, or its folder was removed
        lock = None
    status = _attend(call, lock)
    while lock is None and find_fate(reattach_folder, process_view()) is Fate.ALIVE:  # its guardian may have work to do
        time.sleep(POLL_S)
    return status


def _attend(call: socket.socket, lock: Optional[int]) -> int:
    # The descriptors now belong to the agent: when it closes them, the connection has to end.
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    word = _receive_word(call)
    if word == NOT_NEEDED:
        # Not an exit status: to the controller this must look like a broken connection, not like the agent's end.
        os.kill(os.getpid(), signal.SIGKILL)
    if word == KEPT:
        return 0
    if word or lock is None:
        return 1
    fcntl.flock(lock, fcntl.LOCK_EX)
    return _read_status(lock)


def receive() -> Optional[Message]:
    """Reads the first message; returns None if there is no valid message.

    Nothing follows the message before the answer, so no byte meant for the agent is read.
    """
    decoder = Decoder()
    deadline = time.monotonic() + FIRST_FRAME_S
    while select.select([0], [], [], max(deadline - time.monotonic(), 0.0))[0]:
        data = os.read(0, 1 << 16)
        if not data:
            return None
        try:
            for message, _ in decoder.feed(data):
                return message
        except ProtocolError:
            return None
    return None


def _await_word(call: socket.socket, deadline: float) -> Optional[bytes]:
    """Waits for the agent's answer: empty if the agent has ended; None if it is late, or the connection ends first."""
    poll = select.poll()
    poll.register(call, select.POLLIN)
    # Not POLLIN: the input may be meant for the agent.
    poll.register(0, getattr(select, "POLLRDHUP", 0))
    ready = dict(poll.poll(max(deadline - time.monotonic(), 0.0) * 1000))
    if call.fileno() not in ready:
        return None
    return _receive_word(call)


def _receive_word(call: socket.socket) -> bytes:
    """Reads the agent's answer; empty if the agent has ended."""
    try:
        return call.recv(1)
    except OSError:
        return b""


def _has_hung_up() -> bool:
    """Whether the connection has ended, even if unread input is left."""
    poll = select.poll()
    poll.register(0, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def _await_end(lock: int, deadline: float) -> int:
    """Waits until the guardian of an ended agent is gone too: the guardian may still have processes to kill."""
    poll = select.poll()
    poll.register(0, getattr(select, "POLLRDHUP", 0))
    while time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if poll.poll(POLL_S * 1000):
                return 1
        else:
            return _refuse(AGENT_GONE, "its agent has ended")
    return 1


def _read_status(lock: int) -> int:
    status = os.read(lock, 16)
    return int(status) if status.isdigit() else 1


def _refuse(reference: str, reason: str) -> int:
    with contextlib.suppress(OSError):
        os.write(1, MARKER + encode(Broken(Problem(reference, reason))))
    return 1
