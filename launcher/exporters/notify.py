"""Notifies people of a run's events, on a separate thread: a slow delivery never delays the run."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import queue
import signal
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from socket import gaierror
from typing import IO, Any

from launcher import helpers
from launcher.printable import printable
from launcher.report.notification import Notification, Notifications, make_payload, make_variables
from launcher.report.run_events import Record
from launcher.report.status_report import RunStatus
from launcher.spec.redaction import hide_text
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass

LIMIT_S = 10.0
"""How long one delivery may take."""
OVERTIME_S = 1.0
"""How long it may take after that to kill the command; a server that still sends bytes slowly is given up."""
LAST_S = 5.0
"""How long the end of a run waits for pending deliveries."""
WAITING = 64
"""Notifications that may wait for delivery; more are dropped."""
STDERR_LIMIT = 4096
REDIRECTS = 3


@dataclass(frozen=True)
class Recipients:
    """The recipients of notifications, and the notifications they want. `url` is a secret."""

    url: str | None
    command: Sequence[str] | None
    on: frozenset[str]
    cwd: str


class Notifier:
    """A thread that delivers the notifications of a run in order, each to all recipients at once.

    Calls `warn` once with each reason for a failure.
    """

    def __init__(
        self, recipients: Recipients, make_status: Callable[[], RunStatus], warn: Callable[[str], None]
    ) -> None:
        self._recipients = recipients
        self._make_status = make_status
        self._warn = warn
        self._warned: set[str] = set()
        self._notifications = Notifications()
        self._queue: queue.Queue[Notification | None] = queue.Queue(WAITING)
        """None ends the thread."""
        self._commands: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._idle = threading.Condition()
        self._open = 0
        """The number of notifications that are neither delivered nor failed."""
        threading.Thread(target=self._deliver_all, name="notifier", daemon=True).start()

    def note(self, record: Record) -> None:
        """Takes an event of the run's journal; returns at once."""
        notification = self._notifications.note(record)
        if notification is None or notification.event not in self._recipients.on or self._stopped:
            return
        with self._idle:
            self._open += 1
        try:
            self._queue.put_nowait(notification)
        except queue.Full:
            self._end_one()
            self._say("too many notifications wait for delivery; some are dropped")

    def settle(self, limit_s: float = LAST_S) -> None:
        """Waits for pending deliveries; after `limit_s`, gives up and kills the commands that still run."""
        with self._idle:
            if self._stopped or self._idle.wait_for(lambda: not self._open, limit_s):
                return
        self._stop()
        self._say(f"a notification was not delivered: the end of the run waits for {limit_s:g} s at most")

    def close(self) -> None:
        """Settles, then delivers nothing more."""
        self.settle()
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        for process in [*self._commands]:
            helpers.kill(process)

    def _end_one(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()

    def _deliver_all(self) -> None:
        while (notification := self._queue.get()) is not None and not self._stopped:
            try:
                self._deliver(notification)
            except Exception as error:  # noqa: BLE001 - the run must continue whatever it is
                self._fail("delivery", type(error).__name__)
            finally:
                self._end_one()

    def _deliver(self, notification: Notification) -> None:
        status = self._make_status()
        payload = make_payload(
            notification,
            run_id=status.run_id,
            name=status.name,
            directory=status.directory,
            started=status.started,
            goodput=status.goodput.share if status.goodput is not None else None,
        )
        body = json.dumps(payload).encode()
        deliveries: list[Callable[[], None]] = []
        url, command = self._recipients.url, self._recipients.command
        if url is not None:
            deliveries.append(lambda: self._try("webhook", lambda: post(url, body, LIMIT_S)))
        if command is not None:
            variables = make_variables(payload)
            deliveries.append(lambda: self._try("command", lambda: self._run(command, variables, body)))
        until = time.monotonic() + LIMIT_S + OVERTIME_S
        threads = [threading.Thread(target=delivery, daemon=True) for delivery in deliveries]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():  # the server sends a byte from time to time
                self._fail("webhook", f"no answer within {LIMIT_S:g} s")

    def _try(self, target: str, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except DeliveryError as error:
            self._fail(target, str(error))
        except OSError as error:  # no room for a temporary file, no more processes
            self._fail(target, error.strerror or "an error of the system")

    def _fail(self, target: str, reason: str) -> None:
        if not self._stopped:
            what = "was not delivered" if target == "webhook" else "has failed"
            self._say(f"the {target} of `notify` {what}: {reason}")

    def _say(self, text: str) -> None:
        with self._idle:
            is_new = text not in self._warned
            self._warned.add(text)
        if is_new:
            self._warn(text)

    def _run(self, command: Sequence[str], variables: Mapping[str, str], body: bytes) -> None:
        """Runs the command to its end.

        Raises:
            DeliveryError: the command has failed, or hangs.
        """
        inherited = {name: value for name, value in os.environ.items() if name != environment.RUN_ID}
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:  # pipes need a reader and a writer
            stdin.write(body)
            stdin.seek(0)
            try:
                process = helpers.start(
                    [os.path.expanduser(command[0]), *command[1:]],  # noqa: PTH111 - keeps a name without a slash
                    cwd=self._recipients.cwd,
                    env={**inherited, **variables},
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                )
            except OSError as error:
                raise DeliveryError(f"it cannot be run: {error.strerror}") from None
            self._commands.add(process)
            try:
                status = helpers.wait(process, LIMIT_S)
            except helpers.LostStatusError:
                raise DeliveryError("it has ended with an unknown status") from None
            except subprocess.TimeoutExpired:
                raise DeliveryError(f"it did not end within {LIMIT_S:g} s") from None
            finally:
                helpers.kill(process)
                process.wait()
                self._commands.discard(process)
            if status != 0:
                ended = f"status {status}" if status > 0 else signal.Signals(-status).name
                stderr.seek(max(os.fstat(stderr.fileno()).st_size - STDERR_LIMIT, 0))
                lines = [line for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
                said = f": {printable(hide_text(lines[-1].strip()))[:200]}" if lines else ""
                raise DeliveryError(f"it ended with {ended}{said}")


class DeliveryError(Exception):
    """Why a notification was not delivered, or not confirmed; the text contains no secret."""


def post(url: str, body: bytes, timeout_s: float) -> None:
    """POSTs the object to a secret URL, no part of which is in an error; certificates are verified.

    Raises:
        DeliveryError: the server has not confirmed the object.
    """
    try:
        request = _make_request(url, body)
        with _make_opener().open(request, timeout=timeout_s):
            pass
    except Exception as error:  # noqa: BLE001 - a proxy or an odd server may cause any error; its text may have the URL
        raise DeliveryError(_explain(error, timeout_s)) from None


def _make_request(url: str, body: bytes) -> urllib.request.Request:
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "distlaunch"}
    parts = urllib.parse.urlsplit(url)
    login, at, place = parts.netloc.rpartition("@")
    if at:
        words = urllib.parse.unquote(login).encode()
        headers["Authorization"] = f"Basic {base64.b64encode(words).decode('ascii')}"
    if parts.scheme not in ("http", "https") or not place:
        raise ValueError("not an HTTP URL")
    plain = parts._replace(netloc=place).geturl()
    return urllib.request.Request(plain, body, headers, method="POST")  # noqa: S310 - the scheme was checked


def _make_opener() -> urllib.request.OpenerDirector:
    """An opener for HTTP and HTTPS only."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A handler of redirects that repeat the POST at the same server; others would lose the object or leak it."""

    max_redirections = REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if code not in (307, 308) or (old.scheme, old.netloc) != (new.scheme, new.netloc):
            return None
        headers = dict(req.header_items())
        return urllib.request.Request(newurl, req.data, headers, method="POST")  # noqa: S310 - the same scheme


def _explain(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            where = ", a redirect that is not followed" if 300 <= error.code < 400 else ""
            return f"the server answered {error.code}{where}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return "the server's certificate cannot be verified"
    if isinstance(cause, ssl.SSLError):
        return "no secure connection to the server"
    if isinstance(cause, gaierror):
        return "the server's name cannot be resolved"
    if isinstance(cause, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(cause, (http.client.InvalidURL, ValueError)):
        return "the URL is not the URL of a web server"
    if isinstance(cause, http.client.HTTPException):
        return "the server's answer is not HTTP"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror[:1].lower() + cause.strerror[1:]
    return f"{type(cause).__name__}"
