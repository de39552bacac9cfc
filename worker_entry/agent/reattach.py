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
from typing import Optional, Union

from worker_entry.agent.bootstrap import folders, private
from worker_entry.protocol.framing import MARKER, Decoder, ProtocolError, encode
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.messages import Broken, Message
from worker_entry.protocol.orders import VERSION, Attach, Goodbye
from worker_entry.protocol.values import Problem
from worker_entry.system import kernel

PREFIX = "agent-"
HAND_OVER_S = 2.0
"""How long an agent waits for the message of an attach process that has connected."""
WAITING_CALLS = 64
"""Attach processes that may wait for an agent that does not answer; more are refused at once."""
TAKEN = b"+"
"""The agent's answer to an attach process: from now on the agent uses its connection."""
NOT_NEEDED = b"."
"""The agent's answer to an attach process whose connection has broken or was replaced."""
KEPT = b"="
"""The agent's answer to the process whose run has ended, while the agent stays for the next run."""
REFUSED = b"-"
GUARDIAN_FILE = "guardian"
"""The guardian's pid and start time."""
RUN_FILE = "run"
GENERATION_FILE = "generation"


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
        """Declines the connection without an answer; the attach process then ends on its own."""
        os.close(self.stdin)
        os.close(self.stdout)
        self.call.close()

    def refuse(self, problem: Problem) -> None:
        """Rejects a connection that was accepted before."""
        _reject(self.call, self.stdin, self.stdout, problem)


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
        if self._socket is not None:  # open since an earlier run
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(os.path.join(self.path, "socket"))
        self._socket.listen(WAITING_CALLS)

    def note_run(self, run_id: str) -> None:
        """Writes down this agent's run, for `find_agents`."""
        self._note(RUN_FILE, run_id)

    def note_generation(self, generation: int) -> None:
        """Writes down the generation of the controller that has taken over this agent, for `read_generation`."""
        self._note(GENERATION_FILE, str(generation))

    def renew(self) -> None:
        """Gives the folder another name and forgets the run: no controller of an earlier run finds the agent any more.

        Raises:
            OSError: the folder is gone, or cannot be renamed.
        """
        path = os.path.join(os.path.dirname(self.path), f"{PREFIX}{os.urandom(6).hex()}")
        os.rename(self.path, path)
        self.path = path
        for name in (RUN_FILE, GENERATION_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))

    def _note(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError), open(os.path.join(self.path, name), "w", encoding="utf-8") as stream:
            stream.write(text)

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def accept(self) -> Union[Reattachment, Goodbye, None]:
        """The new connection, or Goodbye if the agent is asked to end; None if the caller is gone or was refused."""
        assert self._socket is not None
        call, _ = self._socket.accept()
        call.settimeout(HAND_OVER_S)
        words, descriptors = b"", list[int]()
        try:
            words, descriptors, _, _ = socket.recv_fds(call, 1 << 16, 2)
            while not words.endswith(b"\n"):
                more = call.recv(1 << 16)
                words += more or b"\n"  # the caller has closed the socket: the frame is incomplete
        except OSError:  # the caller is gone or late, and may come again
            words = b""
        message = _parse(words)
        if isinstance(message, Goodbye):
            return message
        if len(descriptors) == 2 and words:
            stdin, stdout = descriptors
            if isinstance(message, Attach) and message.version == VERSION:
                return Reattachment(message, stdin, stdout, call)
            # A later version of distlaunch has to be able to say why it cannot take over the run.
            problem = Problem("protocol-error", f"the agent was sent no Attach of version {VERSION} of the protocol")
            with contextlib.suppress(OSError):
                call.send(TAKEN)
            _reject(call, stdin, stdout, problem)
            return None
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
        with contextlib.suppress(OSError):  # the agent may have renamed it
            self.path = os.path.dirname(os.readlink(f"/proc/self/fd/{self.lock}"))
        _remove(self.path)


def _parse(words: bytes) -> Optional[Message]:
    """The message in these bytes; None if they are not exactly one."""
    try:
        [(message, _)] = Decoder().feed(words)
    except (ValueError, ProtocolError):
        return None
    return message


def _reject(call: socket.socket, stdin: int, stdout: int, problem: Problem) -> None:
    with contextlib.suppress(OSError):
        os.write(stdout, MARKER + encode(Broken(problem)))
    release(call, REFUSED)
    os.close(stdin)
    os.close(stdout)


def release(call: socket.socket, word: bytes = b"") -> None:
    """Ends the wait of an attach process; continues it if a signal has stopped it, or it would stay forever."""
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
    """Whether an agent or its guardian still holds the folder's lock."""
    try:
        lock = os.open(lock_file(path), os.O_RDWR)
    except OSError:
        return False
    try:
        # Shared, so that two processes that check at the same time do not take each other for the agent.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _write_guardian(path: str) -> None:
    me = kernel.look_up(os.getpid())
    if me is not None:
        with open(os.path.join(path, GUARDIAN_FILE), "w", encoding="ascii") as stream:
            stream.write(f"{me.pid} {me.started}")


def read_generation(path: str) -> int:
    """The generation of the controller that the folder's agent obeys."""
    noted = read_note(path, GENERATION_FILE)
    return int(noted) if noted.isdigit() else 0  # nobody has taken it over


def read_note(path: str, name: str) -> str:
    """What one of the folder's files says; empty if there is none."""
    try:
        with open(os.path.join(path, name), encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return ""


def lock_file(path: str) -> str:
    """Locked while agent or guardian lives; afterwards it contains their exit status."""
    return os.path.join(path, "lock")
