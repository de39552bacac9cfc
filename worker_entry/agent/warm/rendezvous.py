"""The place where a warm agent waits: a private folder with a lock, a socket and a file of facts, one for each key.

The agent that waits there holds the lock, which is free once that process has ended, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from typing import Any, Optional

from worker_entry.agent.connection.reattach_folder import bases, is_locked, lock_file
from worker_entry.protocol.frozen import asdict, dataclass
from worker_entry.system.ownership import private, verify_private

PREFIX = "warm-"
SOCKET, FACTS = "socket", "facts"
WAITING_CALLS = 8
LINE_LIMIT = 8 << 20
END = b"end\n"
"""What `distlaunch down --warm` sends."""


@dataclass(frozen=True)
class WarmAgent:
    """A waiting agent, as `distlaunch ls` shows it."""

    pid: int
    guardian: int
    until: float
    """When it ends on its own: seconds since 1970."""
    bytes: int
    """Memory that the agent and its forkserver do not share with others."""
    executable: str


class WaitingSocket:
    """The folder of an agent that waits."""

    def __init__(self, key: str, path: str, lock: int, listener: socket.socket) -> None:
        self.path = path
        self._key = key
        self._lock = lock
        self._listener = listener
        self._facts: Optional[WarmAgent] = None

    @classmethod
    def take(cls, key: str) -> Optional[WaitingSocket]:
        """The key's place; None if another agent waits there, or no folder can be used."""
        for folder in bases():
            try:
                path = private(os.path.join(private(folder), f"{PREFIX}{key}"))
                lock = os.open(lock_file(path), os.O_RDWR | os.O_CREAT, 0o600)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                listener = _listen(os.path.join(path, SOCKET))
            except BlockingIOError:
                os.close(lock)
                return None
            except OSError:  # a file system without locks or sockets
                os.close(lock)
                continue
            return cls(key, path, lock, listener)
        return None

    def is_intact(self) -> bool:
        """Whether the next run finds this agent: no file of its folder was removed."""
        names = (os.path.join(self.path, SOCKET), _facts_file(self.path))
        return self._has_lock() and all(map(os.path.exists, names))

    def take_again(self) -> bool:
        """Makes what something has removed again; false if another agent has taken the place meanwhile."""
        if not self._has_lock():
            again = WaitingSocket.take(self._key)
            if again is None:
                return False
            self.close()
            self.path, self._lock, self._listener = again.path, again._lock, again._listener
        else:
            self._listener.close()
            self._listener = _listen(os.path.join(self.path, SOCKET))
        if self._facts is not None:
            self.note(self._facts)
        return True

    def _has_lock(self) -> bool:
        """Whether this agent's lock is the folder's current one; after a removal, another lock may have replaced it."""
        try:
            return os.path.samestat(os.stat(lock_file(self.path)), os.fstat(self._lock))
        except OSError:
            return False

    def note(self, facts: WarmAgent) -> None:
        self._facts = facts
        new = os.path.join(self.path, "facts.new")
        with contextlib.suppress(OSError):
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
                json.dump(asdict(facts), stream)
            os.replace(new, _facts_file(self.path))

    def fileno(self) -> int:
        return self._listener.fileno()

    def accept(self) -> socket.socket:
        return self._listener.accept()[0]

    def close(self) -> None:
        """Leaves the place. Its folder and lock stay for the next agent: a new lock would not exclude the old one."""
        self._listener.close()
        for name in (SOCKET, FACTS) if self._has_lock() else ():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))
        os.close(self._lock)


def find_waiting(key: Optional[str] = None) -> Iterator[tuple[str, WarmAgent]]:
    """This user's waiting agents on this machine, with the paths of their sockets; `key`: only that place's."""
    for folder in bases():
        with contextlib.suppress(OSError):
            names = os.listdir(verify_private(folder)) if key is None else [f"{PREFIX}{key}"]
            for name in names:
                path = os.path.join(folder, name)
                facts = _read_facts(path) if name.startswith(PREFIX) else None
                if facts is not None and is_locked(path):
                    yield os.path.join(path, SOCKET), facts


def is_anyone_waiting() -> bool:
    """Whether any of this user's agents waits here; cheap, because every agent asks when it starts."""
    return any(True for _ in find_waiting())


def receive_line(call: socket.socket, words: bytes = b"") -> bytes:
    """Receives the rest of the line that begins with `words`; returns the line.

    Raises:
        OSError: the other side is gone or late, or sends too much.
    """
    while not words.endswith(b"\n"):
        more = call.recv(1 << 20)
        if not more or len(words) > LINE_LIMIT:
            raise OSError("the other side has ended")
        words += more
    return words


def _read_facts(path: str) -> Optional[WarmAgent]:
    try:
        with open(_facts_file(path), encoding="utf-8") as stream:
            facts: dict[str, Any] = json.load(stream)
        return WarmAgent(**facts)
    except (OSError, ValueError, TypeError):
        return None


def _listen(path: str) -> socket.socket:
    with contextlib.suppress(OSError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(WAITING_CALLS)
    return listener


def _facts_file(path: str) -> str:
    return os.path.join(path, FACTS)
