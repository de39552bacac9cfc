"""Shows the metrics of a run to Prometheus.

They are served over HTTP, on threads of their own, or written to a file for the textfile collector of node_exporter.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from socketserver import TCPServer
from typing import IO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import generate_latest, make_wsgi_app
from prometheus_client.registry import CollectorRegistry

from launcher.bounded_server import BoundedServer
from launcher.clock import SystemTiming
from launcher.errors import UsageError
from launcher.report.metrics import make_registry
from launcher.report.status_report import RunStatus
from launcher.rundir.directory import replace_text
from launcher.spec.fields import Endpoint

CLIENT_S = 10.0
"""How long a client may take to send its request, and to read the answer."""
CLIENTS, CLIENTS_OF_ADDRESS = 32, 8
"""The most clients at the same time: in total, and from one address."""
EVERY_S = 5.0
LAST_S = 2.0
"""How long the last state may take to be written."""


class MetricsServer:
    """An HTTP server that listens as soon as it is created, and answers after `begin`.

    Raises:
        UsageError: this machine cannot listen at the endpoint.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            [(family, *_, address), *_] = socket.getaddrinfo(
                endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            self._server = _Server(family, address)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a valid host name"
            raise UsageError(
                f"cannot serve metrics at {endpoint}: {reason}",
                hint="choose another address or port for `metrics`, or stop the program that uses it",
            ) from None
        self._serving: BoundedServer | None = None

    @property
    def port(self) -> int:
        """The server's TCP port."""
        return int(self._server.server_address[1])

    def begin(self, make_status: Callable[[], RunStatus]) -> None:
        """Starts to answer with the run's state."""
        self._server.set_app(make_wsgi_app(make_registry(make_status)))
        self._serving = BoundedServer(
            self._server.socket,
            self._answer,
            name="metrics",
            limit=CLIENTS,
            per_address=CLIENTS_OF_ADDRESS,
            within_s=CLIENT_S,
        )

    def close(self) -> None:
        """Stops answering, without waiting for a client."""
        if self._serving is None:
            self._server.server_close()
        else:
            self._serving.close()

    def _answer(self, client: socket.socket, _: Callable[[], None]) -> None:
        # An error in a request, or a disconnection, affects only this client.
        with contextlib.suppress(Exception):
            self._server.finish_request(client, client.getpeername())


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, *_: object) -> None:
        """Logs nothing: the terminal is for the run's output."""

    def get_stderr(self) -> IO[str]:
        """Discards the traceback of a failed scrape, for the same reason."""
        return io.StringIO()


class _Server(WSGIServer):
    """Answers clients; BoundedServer accepts them."""

    def __init__(self, family: int, address: tuple[object, ...]) -> None:
        self.address_family = family
        super().__init__(address, _Handler)  # type: ignore[arg-type]  # an IPv6 address has four parts

    def server_bind(self) -> None:
        """Binds without a reverse lookup of the address, which may be slow."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", int(self.server_address[1])
        self.setup_environ()


class MetricsFile:
    """A metrics file, replaced every few seconds and at the end; a failed write does not fail the run.

    Raises:
        UsageError: no file can be written at `path`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._registry: CollectorRegistry | None = None
        self._warn: Callable[[str], None] = lambda _: None
        self._failed = False
        self._lock = threading.Lock()
        self._end: Callable[[], None] = lambda: None
        if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(
                f"cannot write the metrics to {path}", hint="name a file in a folder that exists and is writable"
            )

    def begin(self, make_status: Callable[[], RunStatus], warn: Callable[[str], None]) -> None:
        """Starts to write the run's state; calls `warn` with the first failure."""
        self._warn = warn
        self._registry = make_registry(make_status)
        self._end = SystemTiming().repeat(self._write, EVERY_S)

    def close(self) -> None:
        """Writes the last state; does not wait for a disk that hangs."""
        self._end()
        last = threading.Thread(target=self._write, daemon=True)
        last.start()
        last.join(LAST_S)

    def _write(self) -> bool:
        with self._lock:
            if self._registry is not None:
                try:
                    # Not the library's own function: in a shared folder, it could write through a link.
                    replace_text(self._path, generate_latest(self._registry).decode(), 0o644)
                except Exception as error:  # noqa: BLE001 - the run must continue whatever it is
                    self._note_failure(error)
        return False

    def _note_failure(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            self._warn(f"cannot write the metrics to {self._path}: {reason}; the run continues")
