"""The control socket, where other processes of the user ask a controller for status, stacks, a profile or a stop.

The socket is a Unix socket in a private folder; run.json has its path. Each connection carries one request and its
answer, as frames. Both sides check their peer. A malformed request, or a client that does not read, costs only its own
connection.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.bounded_server import BoundedServer
from worker_entry.agent.connection.reattach_folder import bases
from worker_entry.protocol.framing import Decoder, ProtocolError, encode
from worker_entry.protocol.frozen import dataclass, field
from worker_entry.system.ownership import private
from worker_entry.system.peer import is_ours
from worker_entry.task.profiling import ATTEMPTS, GATHER_S

PREFIX = "control-"
PATH_LIMIT = 100
"""Bytes of a socket's path that all systems accept."""
NEW = ".new"
CLIENTS = 32
"""Connections that are served at once; further connections are closed."""
NOT_KNOWN = "its controller is of another version of distlaunch, which does not know this request"
PYTHON_S = 30.0
"""Time for the Python that makes a profile to start and to connect."""
CLIENT_S = 10.0
"""How long a client may take to send its request, and to read the answer."""


@dataclass(frozen=True)
class AskStatus:
    """Asks what the run is doing; the answer is the JSON of a RunStatus."""


@dataclass(frozen=True)
class AskStacks:
    """Asks what all tasks are doing; the answer is their stacks, as text."""


@dataclass(frozen=True)
class AskProfile:
    """Asks for a profile of all tasks; the answer is JSON: `tasks`, their names, and `answer`, a Profiled."""

    duration_s: float

    @property
    def limit_s(self) -> float:
        """How long the profile may take."""
        return ATTEMPTS * (self.duration_s + GATHER_S) + PYTHON_S


@dataclass(frozen=True)
class AskStop:
    """Asks to stop the run; `now`: without a grace. Answered at once; the connection stays open until the run's end."""

    now: bool


@dataclass(frozen=True)
class AskFiles:
    """Asks how much has been collected; the answer is the JSON of a Collection.

    `begins`: whether to begin a collection, unless one is in progress, with these patterns, or else those of the spec.
    """

    begins: bool
    patterns: list[str] = field(default_factory=list)


Request = AskStatus | AskStacks | AskProfile | AskFiles | AskStop


@dataclass(frozen=True)
class Answer:
    """The header before `length` bytes, which are the answer or the reason why there is none."""

    good: bool
    length: int


class RefusedError(Exception):
    """A request cannot be answered; the text tells the user why."""


class ControlServer:
    """The server of the control socket, which answers in its own threads.

    Connections wait until `serve`.
    """

    def __init__(self) -> None:
        self._slots = threading.Semaphore(CLIENTS)
        self._kept: list[socket.socket] = []
        self._socket, self.path = _listen()
        self._serving: BoundedServer | None = None

    def serve(self, answer: Callable[[Request], bytes]) -> None:
        """Starts to answer requests. `answer` raises RefusedError if there is no answer."""
        if self._socket is not None:
            self._serving = BoundedServer(
                self._socket,
                functools.partial(self._serve_client, answer),
                name="control",
                limit=CLIENTS,
                per_address=CLIENTS,
                within_s=CLIENT_S,
                tick=self._restore,
            )

    def close(self) -> None:
        """Stops serving; the connections that wait for the run's end close when the process exits."""
        if self._socket is None:
            return
        if self._serving is not None:
            self._serving.close()
        else:
            self._socket.close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()

    def _restore(self) -> socket.socket | None:
        """A new socket at the same path, if the old one was removed."""
        with contextlib.suppress(OSError):
            if not Path(self.path).exists():
                return _listen_at(Path(self.path))
        return None

    def _serve_client(self, make: Callable[[Request], bytes], client: socket.socket, note: Callable[[], None]) -> None:
        if not is_ours(client) or not self._slots.acquire(blocking=False):
            return
        try:
            client.settimeout(CLIENT_S)
            request = None
            try:
                request, _ = _receive(client, Request)
                note()  # the answer may take long
                body, good = make(request), True
            except ProtocolError:
                body, good = NOT_KNOWN.encode(), False
            except RefusedError as error:
                body, good = str(error).encode(), False
            client.settimeout(CLIENT_S)
            client.sendall(_encode(Answer(good, len(body))) + body)
            if isinstance(request, AskStop) and good:
                self._kept.append(socket.socket(fileno=client.detach()))
        finally:
            self._slots.release()


def ask(path: str, pid: int, request: Request, timeout_s: float) -> tuple[bytes, socket.socket]:
    """Returns the controller's answer and the connection.

    Raises:
        RefusedError: the controller cannot answer.
        OSError: the controller does not answer, or another process answers.
    """
    with contextlib.ExitStack() as failing:
        connection = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(timeout_s)
        connection.connect(path)
        _check_peer(connection, path, pid)
        connection.sendall(_encode(request))
        body = _receive_answer(connection, path)
        failing.pop_all()
    return body, connection


def _check_peer(connection: socket.socket, path: str, pid: int) -> None:
    if not is_ours(connection, pid):
        raise PermissionError(errno.EPERM, "belongs to another process", path)


def _receive_answer(connection: socket.socket, path: str) -> bytes:
    try:
        answer, body = _receive(connection, Answer | None)
    except ProtocolError as error:
        raise OSError(errno.EPROTO, f"sent {error}", path) from None
    if not answer.good:
        raise RefusedError(body.decode("utf-8", "replace"))
    return body


def wait_for_end(connection: socket.socket, timeout_s: float) -> None:
    """Waits until the controller ends and so closes the connection, but at most for `timeout_s`."""
    with connection, contextlib.suppress(OSError):  # a time-out is an OSError
        connection.settimeout(timeout_s)
        connection.recv(1)


def _encode(message: Any) -> bytes:
    return encode(message)


def _receive(connection: socket.socket, kinds: Any) -> tuple[Any, bytes]:
    decoder = Decoder(kinds)
    while True:
        data = connection.recv(1 << 16)
        if not data:
            raise ProtocolError("an incomplete frame")
        for message, body in decoder.feed(data):
            return message, body


def _listen() -> tuple[socket.socket | None, str]:
    """Returns a listening socket and its path; None if no folder of this machine can hold one."""
    name = f"{PREFIX}{os.urandom(6).hex()}"
    for base in bases():
        path = Path(base, name)
        if len(os.fsencode(path.with_suffix(NEW))) > PATH_LIMIT:
            continue
        with contextlib.suppress(OSError):
            _remove_abandoned(Path(private(base)))
            return _listen_at(path), str(path)
    return None, ""


def _listen_at(path: Path) -> socket.socket:
    """A listening socket at this path; raises OSError."""
    new = path.with_suffix(NEW)
    private(str(path.parent))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        new.unlink(missing_ok=True)
        server.bind(str(new))
        new.chmod(0o600)
        server.listen(CLIENTS)
        new.rename(path)  # only now: other controllers remove sockets that do not listen
    except OSError:
        server.close()
        raise
    return server


def _remove_abandoned(folder: Path) -> None:
    """Removes the sockets of controllers that were killed."""
    for path in folder.glob(f"{PREFIX}*"):
        if path.suffix == NEW:
            continue
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
