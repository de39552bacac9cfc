"""The reattach folder: a private folder with a lock and a socket, through which a controller comes back to its agent.

A new connection starts an attach process on the node (see `handover`), which hands its own stdin and stdout to the
agent over the socket. Only guardian and agent hold the lock, so it is free when both are gone, however they ended. If
something else removes the folder, the agent makes it again under the same name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterable, Iterator
from typing import Optional

from worker_entry.bootstrap.install import folders
from worker_entry.system import kernel
from worker_entry.system.ownership import private

PREFIX = "agent-"
LOCK, SOCKET, NEW_LOCK = "lock", "socket", "lock.new"
WAITING_CALLS = 64
"""Attach processes that may wait for an agent that does not answer; more are refused at once."""
GUARDIAN_FILE = "guardian"
"""The guardian's pid and start time."""
RUN_FILE = "run"
GENERATION_FILE = "generation"


class ReattachFolder:
    """One agent's folder. `lock` stays locked until the last process that holds it ends.

    Guardian and agent each have a copy of the object.
    """

    def __init__(self, path: str, lock: int) -> None:
        self.path = path
        self.lock = lock
        self._earlier: list[int] = []
        """The locks of folders that something has removed."""
        self._notes: dict[str, str] = {}
        self._socket: Optional[socket.socket] = None
        # What the agent sends to its guardian stays open as long as the guardian lives, even before it is received.
        self._from_agent, self._to_guardian = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._to_guardian.setblocking(False)

    @classmethod
    def make(cls, parents: Optional[Iterable[str]] = None) -> Optional[ReattachFolder]:
        """Makes a folder, on a local file system if possible; returns None if no folder can be made.

        `parents`: where to try, instead of in `bases`.
        """
        for folder in bases() if parents is None else parents:
            try:
                remove_abandoned(private(folder))
                path = os.path.join(folder, f"{PREFIX}{os.urandom(6).hex()}")
                os.mkdir(path, 0o700)
                lock = _make_lock(path)
                reattach_folder = cls(path, lock)
                reattach_folder._note(GUARDIAN_FILE, _describe_guardian())
                _publish_lock(path)
            except OSError:
                continue
            return reattach_folder
        return None

    def listen(self) -> None:
        """Opens the socket; called by the agent, because no other process may keep the socket open."""
        if self._socket is None:  # not open since an earlier run
            self._socket = _listen(self.path)

    def is_intact(self) -> bool:
        """Whether a controller can find the agent here: nothing has removed the lock or the socket."""
        try:
            if self._socket is not None:
                os.stat(os.path.join(self.path, SOCKET))
            return os.path.samestat(os.stat(lock_file(self.path)), os.fstat(self.lock))
        except OSError:
            return False

    def ensure(self) -> None:
        """Makes the folder again, with the same name, if something has removed it; called by the agent.

        Raises:
            OSError: it cannot be made.
        """
        if not self.is_intact():
            self._restore()

    def _restore(self) -> None:
        private(os.path.dirname(self.path))
        private(self.path)
        for name, text in self._notes.items():
            self._note(name, text)
        if self._socket is not None:
            earlier, self._socket = self._socket, _listen(self.path)
            earlier.close()
        lock = _make_lock(self.path)
        try:
            socket.send_fds(self._to_guardian, [b"+"], [lock])
            _publish_lock(self.path)
        except OSError:
            os.close(lock)
            raise
        self._earlier.append(self.lock)  # it stays locked: attach processes may wait for it
        self.lock = lock

    def note_run(self, run_id: str) -> None:
        """Writes down this agent's run, for `find_agents`."""
        self._note(RUN_FILE, run_id)

    def note_generation(self, generation: int) -> None:
        """Writes down the generation of the controller that has taken over this agent, for `read_generation`."""
        self._note(GENERATION_FILE, str(generation))

    def renew(self) -> None:
        """Gives the folder another name and forgets the run: no controller of an earlier run finds the agent any more.

        Raises:
            OSError: the folder cannot be made or renamed.
        """
        self.ensure()
        path = os.path.join(os.path.dirname(self.path), f"{PREFIX}{os.urandom(6).hex()}")
        os.rename(self.path, path)
        self.path = path
        for name in (RUN_FILE, GENERATION_FILE):
            self._notes.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))

    def _note(self, name: str, text: str) -> None:
        self._notes[name] = text
        with contextlib.suppress(OSError), open(os.path.join(self.path, name), "w", encoding="utf-8") as stream:
            stream.write(text)

    def fileno(self) -> int:
        assert self._socket is not None
        return self._socket.fileno()

    def accept(self) -> socket.socket:
        """The connection of an attach process, or of another process."""
        assert self._socket is not None
        return self._socket.accept()[0]

    def close(self, status: int) -> None:
        """Called by the guardian at its end: attach processes that wait for the lock exit with the same status."""
        locks = [*self._earlier, self.lock, *self._receive_locks()]
        for lock in locks:
            with contextlib.suppress(OSError):
                os.write(lock, str(status).encode())
        self.lock = locks[-1]
        with contextlib.suppress(OSError):  # the agent may have renamed it
            self.path = os.path.dirname(os.readlink(f"/proc/self/fd/{self.lock}"))
        _remove(self.path)
        for lock in locks:
            os.close(lock)
        for end in (self._from_agent, self._to_guardian):
            end.close()

    def _receive_locks(self) -> Iterator[int]:
        """The locks of the folders that the agent has made in place of the first one."""
        self._from_agent.setblocking(False)
        with contextlib.suppress(OSError):
            while True:
                _, locks, _, _ = socket.recv_fds(self._from_agent, 1, 1)
                yield from locks


def bases() -> list[str]:
    """Parents of reattach folders, best first: a home is often on a network disk, where sockets and locks may fail."""
    cache, *shared = folders()
    return [*reversed(shared), cache]


def remove_abandoned(folder: str) -> None:
    """Removes the reattach folders of agents that were killed together with their guardians."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if name.startswith(PREFIX) and os.path.exists(lock_file(path)) and not is_locked(path):
            _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)


def is_locked(path: str) -> bool:
    """Whether a process holds the folder's lock; if the lock is missing, that proves nothing (`evidence`)."""
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


def _make_lock(path: str) -> int:
    """A lock that is held already, under a name that no other process knows."""
    new = os.path.join(path, NEW_LOCK)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _publish_lock(path: str) -> None:
    """Gives the new lock its name: no process ever sees it unlocked."""
    os.rename(os.path.join(path, NEW_LOCK), lock_file(path))


def _listen(path: str) -> socket.socket:
    """A socket in the folder; only its owner may connect, whatever happens to the folder."""
    name = os.path.join(path, SOCKET)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    os.chmod(name, 0o600)
    listener.listen(WAITING_CALLS)
    return listener


def _describe_guardian() -> str:
    me = kernel.look_up(os.getpid())
    return f"{me.pid} {me.started}" if me is not None else ""


def read_generation(path: str) -> int:
    """The generation of the controller that the folder's agent obeys."""
    noted = read_note(path, GENERATION_FILE)
    return int(noted) if noted.isdigit() else 0  # no controller has taken it over


def read_note(path: str, name: str) -> str:
    """The content of one of the folder's files; empty if the file is missing."""
    try:
        with open(os.path.join(path, name), encoding="utf-8") as stream:
            return stream.read()
    except OSError:
        return ""


def lock_file(path: str) -> str:
    """Locked while agent or guardian lives; afterwards it contains their exit status."""
    return os.path.join(path, LOCK)
