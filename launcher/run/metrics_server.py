"""Serves the metrics of a run over HTTP, on its own threads."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from typing import IO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import make_wsgi_app

from launcher.errors import UsageError
from launcher.report.metrics import make_registry
from launcher.report.status_report import RunStatus
from launcher.spec.fields import Endpoint

CLIENT_S = 10.0
"""How long a client may take to send its request."""


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
                hint="choose another address or port with --metrics, or stop the program that uses it",
            ) from None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The server's TCP port."""
        return int(self._server.server_address[1])

    def begin(self, make_status: Callable[[], RunStatus]) -> None:
        """Starts to answer with the run's state."""
        self._server.set_app(make_wsgi_app(make_registry(make_status)))
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering, without waiting for a client."""
        if self._thread is None:
            self._server.server_close()
        else:  # `shutdown` waits for the next turn of the server's loop
            threading.Thread(target=self._server.shutdown, daemon=True).start()

    def _serve(self) -> None:
        with self._server:
            self._server.serve_forever()


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_S

    def log_message(self, *_: object) -> None:
        """Logs nothing: the terminal is for the run's output."""

    def get_stderr(self) -> IO[str]:
        """Discards the traceback of a failed scrape, for the same reason."""
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    """A server with one thread per client."""

    daemon_threads = True

    def __init__(self, family: int, address: tuple[object, ...]) -> None:
        self.address_family = family
        super().__init__(address, _Handler)  # type: ignore[arg-type]  # an IPv6 address has four parts

    def server_bind(self) -> None:
        """Binds without a reverse lookup of the address, which may be slow."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, *_: object) -> None:
        """Ignores clients that disconnect or send malformed requests."""
