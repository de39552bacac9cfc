"""Web servers on loopback that keep each POST, and answer it as the test says."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Request(BaseHTTPRequestHandler):
    """One request; the server's `take` answers it."""

    server: WebServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        self.server.take(self)

    def do_GET(self) -> None:
        self.server.gets += 1
        self.answer(200)

    def answer(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


class WebServer(ThreadingHTTPServer):
    """A server. `bodies`: the bodies of all POSTs, in order."""

    daemon_threads = True

    def __init__(self, take: Callable[[Request], None]) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.take = take
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.gets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hooks/sesame"

    @property
    def said(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]


def answer_ok(request: Request) -> None:
    request.answer(200)


@contextmanager
def serving(take: Callable[[Request], None] = answer_ok, tls: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    server = WebServer(take)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
