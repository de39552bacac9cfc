"""The reattach folder: a private folder with a lock and a socket, through which a controller comes back to its agent.

A new connection starts an attach process on the node (see `reattachment`), which hands its own stdin and stdout to the
agent over the socket. Only guardian and agent hold the lock, so it is free when both are gone, however they ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Optional, Union

from worker_entry.agent.bootstrap import folders, private
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.messages import Broken, Message
from worker_entry.protocol.orders import VERSION, Attach, Goodbye
from worker_entry.protocol.values import Problem
from worker_entry.system import kernel

PREFIX = "agent-"
HAND_OVER_S = 2.0
"""How long an agent waits for the message of an attach process that has connected."""
WAITING_CALLS = 64
"""Attach processes that may wait for an agent that does not answer; more are refused at once."""
CALL_S = 1.0
KILL_S = 5.0
"""How long killed processes may take to disappear."""
TAKEN = b"+"
"""The agent's answer to an attach process: from now on the agent uses its connection."""
NOT_NEEDED = b"."
"""The agent's answer to an attach process whose connection has broken or was replaced."""
REFUSED = b"-"


@dataclass(frozen=True)
class Reattachment:
    """A new connection: its descriptors, its Attach, and the socket to its attach process."""

    attach: Attach
    stdin: int
    stdout: int
    call: socket.socket

    def take(self) -> bool:
        """Accepts the connection; false if the attach process has ended, and the connection with it."""
        try:
            self.call.send(TAKEN)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Declines the connection without an answer; the attach process then ends by itself."""
        os.close(self.stdin)
        os.close(self.stdout)
        self.call.close()

    def refuse(self, reason: str) -> None:
        """Rejects a connection that was accepted before."""
        problem = Problem("protocol-error", f"the agent was sent {reason}")
        with contextlib.suppress(OSError):
            os.write(self.stdout, MARKER + encode(Broken(problem)))
        release(self.call, REFUSED)
        os.close(self.stdin)
        os.close(self.stdout)


class ReattachFolder:
    """One agent's folder. `lock` stays locked until the last process that holds it ends."""

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self.lock = lock
        self._socket: Optional[socket.socket] = None

    @classmethod
    def make(cls) -> Optional[ReattachFolder]:
        """Makes a folder, on a local file system if possible; returns None if no folder can be made."""
        for folder in bases():
            try:
                remove_abandoned(private(folder))
                path = os.path.join(folder, f"{PREFIX}{os.urandom(6).hex()}")
                os.mkdir(path, 0o700)
                new = os.path.join(path, "lock.new")
                lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_guardian(path)
                os.rename(new, lock_file(path))  # no process ever sees it unlocked
            except OSError:
                continue
            return cls(path, lock)
        return None

    def listen(self) -> None:
        """Opens the socket; called by the agent, because no other process may keep the socket open."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.path.join(self.path, "socket"))
        self._socket.listen(WAITING_CALLS)

    def note_run(self, run_id: str) -> None:
        """Writes down this agent's run, for `find_agents`."""
        with contextlib.suppress(OSError), open(_run_file(self.path), "w", encoding="utf-8") as stream:
            stream.write(run_id)

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def accept(self) -> Union[Reattachment, Goodbye, None]:
        """The new connection, or Goodbye if the agent is asked to end; None if the caller is gone or not ours."""
        assert self._socket is not None
        call, _ = self._socket.accept()
        call.settimeout(HAND_OVER_S)
        descriptors: list[int] = []
        attach: Optional[Message]
        try:
            words, descriptors, _, _ = socket.recv_fds(call, 1 << 16, 2)
            while not words.endswith(b"\n"):
                more = call.recv(1 << 16)
                words += more or b"\n"  # the caller has closed the socket: the frame is incomplete
            [(attach, _)] = Decoder().feed(words)
            if isinstance(attach, Goodbye):
                return attach
            stdin, stdout = descriptors
        except (OSError, ValueError, ProtocolError):
            attach = None
        if isinstance(attach, Attach) and attach.version == VERSION:
            return Reattachment(attach, stdin, stdout, call)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            call.send(NOT_NEEDED)
        call.close()
        return None

    def close(self, status: int) -> None:
        """Called by the guardian at its end: attach processes that wait for the lock exit with the same status."""
        with contextlib.suppress(OSError):
            os.write(self.lock, str(status).encode())
        _remove(self.path)


def release(call: socket.socket, word: bytes = b"") -> None:
    """Ends the wait of an attach process; continues it first if a signal has stopped it, or it would stay for ever."""
    with contextlib.suppress(OSError):
        if word:
            call.send(word)
    if kernel.LINUX:
        with contextlib.suppress(OSError):
            pid, _, _ = struct.unpack("3i", call.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            os.kill(pid, signal.SIGCONT)
    call.close()


def bases() -> list[str]:
    """Parents of reattach folders, best first: a home is often on a network disk, where sockets and locks may fail."""
    cache, *shared = folders()
    return [*reversed(shared), cache]


def remove_abandoned(folder: str) -> None:
    """Removes the reattach folders of agents that were killed together with their guardians."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(PREFIX) and os.path.exists(lock_file(path)) and not is_alive(path):
            _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def is_alive(path: str) -> bool:
    """Whether an agent or its guardian still holds the lock."""
    try:
        lock = os.open(lock_file(path), os.O_RDWR)
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
    """The reattach folders of these runs' living agents on this machine."""
    found = []
    for folder in bases():
        with contextlib.suppress(OSError):
            for name in os.listdir(private(folder)):
                path = os.path.join(folder, name)
                if name.startswith(PREFIX) and _read_run(path) in run_ids and is_alive(path):
                    found.append(path)
    return found


def end_agents(reattach_folders: Collection[str], within_s: float) -> bool:
    """Asks the agents of these folders to end and waits for them; returns whether all are gone.

    It asks their guardians as well, which kill an agent that does not react, and finally kills what is left.
    """
    for path in reattach_folders:
        _say_goodbye(path)
        _signal_guardian(path, signal.SIGTERM, signal.SIGCONT)
    for ask, wait_s in ((lambda _: None, within_s), (_kill_guardian, KILL_S)):
        for path in filter(is_alive, reattach_folders):
            ask(path)
        deadline = time.monotonic() + wait_s
        while any(map(is_alive, reattach_folders)) and time.monotonic() < deadline:
            time.sleep(0.02)
    return not any(map(is_alive, reattach_folders))


def _say_goodbye(path: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
        call.settimeout(CALL_S)
        call.connect(os.path.join(path, "socket"))
        call.sendall(encode(Goodbye()))


def _kill_guardian(path: str) -> None:
    """Kills the guardian, but everything below it first: without the guardian nothing would stop those processes."""
    guardian = _find_guardian(path)
    if guardian is None:
        return
    for process in (*kernel.descendants(guardian.pid), guardian):
        with contextlib.suppress(OSError):
            kernel.send_signal(process, signal.SIGKILL)


def _signal_guardian(path: str, *signums: int) -> None:
    guardian = _find_guardian(path)
    if guardian is not None:
        for signum in signums:
            with contextlib.suppress(OSError):
                kernel.send_signal(guardian, signum)


def _write_guardian(path: str) -> None:
    me = kernel.look_up(os.getpid())
    if me is not None:
        with open(_guardian_file(path), "w", encoding="ascii") as stream:
            stream.write(f"{me.pid} {me.started}")


def _find_guardian(path: str) -> Optional[kernel.Process]:
    """The folder's guardian, if it lives and can be seen from here: a container has its own process numbers."""
    try:
        with open(_guardian_file(path), encoding="ascii") as stream:
            pid, started = map(int, stream.read().split())
    except (OSError, ValueError):
        return None
    found = kernel.look_up(pid)
    return found if found is not None and found.started == started and is_alive(path) else None


def _read_run(path: str) -> str:
    try:
        with open(_run_file(path), encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return ""


def _guardian_file(path: str) -> str:
    return os.path.join(path, "guardian")


def _run_file(path: str) -> str:
    return os.path.join(path, "run")


def lock_file(path: str) -> str:
    """Locked while agent or guardian live; afterwards it contains their exit status."""
    return os.path.join(path, "lock")
