"""Serves the metrics of a run over HTTP, on its own threads."""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Callable
from socketserver import TCPServer
from typing import IO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import make_wsgi_app

from launcher.bounded_server import BoundedServer
from launcher.errors import UsageError
from launcher.report.metrics import make_registry
from launcher.report.status_report import RunStatus
from launcher.spec.fields import Endpoint

CLIENT_S = 10.0
"""How long a client may take to send its request, and to read the answer."""
CLIENTS, CLIENTS_OF_ADDRESS = 32, 8
"""Clients at the same time: of all addresses, and of one."""


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
        # Whatever a request or a disconnection causes concerns this client alone.
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
    """Answers clients; who accepts them is another's affair."""

    def __init__(self, family: int, address: tuple[object, ...]) -> None:
        self.address_family = family
        super().__init__(address, _Handler)  # type: ignore[arg-type]  # an IPv6 address has four parts

    def server_bind(self) -> None:
        """Binds without a reverse lookup of the address, which may be slow."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", int(self.server_address[1])
        self.setup_environ()
