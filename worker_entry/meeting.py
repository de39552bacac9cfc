"""How a controller whose connection broke comes back to its agent: over a private folder with a lock and a socket.

A new connection starts a newcomer on the node, which hands its own stdin and stdout to the agent over the socket,
and then only waits: the connection lives as long as it does. Guardian and agent hold the lock and nobody else, so
it is free as soon as both are gone, however they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Optional, Union

from worker_entry.arrival import folders, private
from worker_entry.messages import Broken, Message
from worker_entry.orders import AGENT_GONE, VERSION, Attach, Goodbye
from worker_entry.protocol import MARKER, Decoder, ProtocolError, encode
from worker_entry.values import Problem

PREFIX = "agent-"
HAND_OVER_S = 2.0
"""How long an agent waits for a newcomer that has called to say what it wants."""
NOT_NEEDED = b"."
"""What a newcomer is told whose connection has broken, or was replaced."""


@dataclass(frozen=True)
class Newcomer:
    """A new connection's ends, and what it came with."""

    attach: Attach
    stdin: int
    stdout: int
    call: socket.socket

    def refuse(self, reason: str) -> None:
        """Sends it away."""
        with contextlib.suppress(OSError):
            os.write(self.stdout, encode(Broken(Problem("protocol-error", f"the agent was sent {reason}"))))
            self.call.send(NOT_NEEDED)
        os.close(self.stdin)
        os.close(self.stdout)
        self.call.close()


class Meeting:
    """The place of one agent. `lock` stays open until the last process that has it ends."""

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self.lock = lock
        self._socket: Optional[socket.socket] = None

    @classmethod
    def make(cls) -> Optional[Meeting]:
        """A new place, on a file system of this machine if one can be had; None if there is nowhere."""
        for folder in bases():
            try:
                remove_abandoned(private(folder))
                path = os.path.join(folder, f"{PREFIX}{os.urandom(6).hex()}")
                os.mkdir(path, 0o700)
                new = os.path.join(path, "lock.new")
                lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(new, _lock_file(path))  # nobody sees it unlocked
            except OSError:
                continue
            return cls(path, lock)
        return None

    def listen(self) -> None:
        """Called by the agent: the socket must not outlive it in another process."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.path.join(self.path, "socket"))
        self._socket.listen(4)

    def note_run(self, run_id: str) -> None:
        """For `end_agents`: the run that this agent belongs to."""
        with contextlib.suppress(OSError), open(_run_file(self.path), "w", encoding="utf-8") as stream:
            stream.write(run_id)

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def accept(self) -> Union[Newcomer, Goodbye, None]:
        """Who has called, or that the agent shall end; None if it went away again, or is not one of ours."""
        assert self._socket is not None
        call, _ = self._socket.accept()
        call.settimeout(HAND_OVER_S)
        descriptors: list[int] = []
        attach: Optional[Message]
        try:
            words, descriptors, _, _ = socket.recv_fds(call, 1 << 16, 2)
            while not words.endswith(b"\n"):
                more = call.recv(1 << 16)
                words += more or b"\n"  # it hung up: no frame
            [(attach, _)] = Decoder().feed(words)
            if isinstance(attach, Goodbye):
                return attach
            stdin, stdout = descriptors
        except (OSError, ValueError, ProtocolError):
            attach = None
        if isinstance(attach, Attach) and attach.version == VERSION:
            return Newcomer(attach, stdin, stdout, call)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            call.send(NOT_NEEDED)
        call.close()
        return None

    def close(self, status: int) -> None:
        """Called by the guardian at its end: newcomers that wait for it end with the same status."""
        with contextlib.suppress(OSError):
            os.write(self.lock, str(status).encode())
        _remove(self.path)


def bases() -> list[str]:
    """Folders for meeting places, best first: a home is often on the network, where sockets and locks are no good."""
    cache, *shared = folders()
    return [*reversed(shared), cache]


def remove_abandoned(folder: str) -> None:
    """Removes the places of agents that were killed with their guardians."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(PREFIX) and os.path.exists(_lock_file(path)) and not is_alive(path):
            _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def is_alive(path: str) -> bool:
    """Whether an agent or its guardian still holds the place."""
    try:
        lock = os.open(_lock_file(path), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def find_agents(run_ids: Collection[str]) -> list[str]:
    """The meeting places of the living agents of these runs on this machine."""
    found = []
    for folder in bases():
        with contextlib.suppress(OSError):
            for name in os.listdir(private(folder)):
                path = os.path.join(folder, name)
                if name.startswith(PREFIX) and _read_run(path) in run_ids and is_alive(path):
                    found.append(path)
    return found


def end_agents(meetings: Collection[str], within_s: float) -> bool:
    """Asks the agents that have these places to end, and waits until they have; returns whether they did."""
    for path in meetings:
        _say_goodbye(path)
    deadline = time.monotonic() + within_s
    while any(map(is_alive, meetings)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_alive, meetings))


def _say_goodbye(path: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        call.connect(os.path.join(path, "socket"))
        call.sendall(encode(Goodbye()))


def _read_run(path: str) -> str:
    try:
        with open(_run_file(path), encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return ""


def hand_over() -> int:
    """What a newcomer does: reads Attach, gives stdin and stdout away, ends when the agent has; returns its status."""
    message = receive()
    os.write(1, MARKER)
    if not isinstance(message, Attach):
        return _refuse("protocol-error", "a newcomer was not sent Attach")
    try:
        lock = os.open(_lock_file(message.meeting), os.O_RDWR)
    except OSError:
        return _refuse(AGENT_GONE, "its agent has ended")
    try:
        call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        call.connect(os.path.join(message.meeting, "socket"))
        socket.send_fds(call, [encode(message)], [0, 1])
    except OSError:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its guardian may still have processes to end
        return _refuse(AGENT_GONE, "its agent has ended")
    # From here on they are the agent's: the connection has to see the agent close them.
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)
    with contextlib.suppress(OSError):
        if call.recv(1) == NOT_NEEDED:
            return 0
    fcntl.flock(lock, fcntl.LOCK_EX)
    status = os.read(lock, 16)
    return int(status) if status.isdigit() else 1


def receive() -> Optional[Message]:
    """The first message. Nothing follows it until it is answered, so no byte of the agent's is read."""
    decoder = Decoder()
    while True:
        data = os.read(0, 1 << 16)
        if not data:
            return None
        try:
            for message, _ in decoder.feed(data):
                return message
        except ProtocolError:
            return None


def _refuse(reference: str, reason: str) -> int:
    with contextlib.suppress(OSError):
        os.write(1, encode(Broken(Problem(reference, reason))))
    sys.stdout.flush()
    return 1


def _run_file(path: str) -> str:
    return os.path.join(path, "run")


def _lock_file(path: str) -> str:
    return os.path.join(path, "lock")
