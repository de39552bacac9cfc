"""POSTs a JSON object to a secret URL: no error contains any part of the URL."""

from __future__ import annotations

import base64
import http.client
import ssl
import urllib.error
import urllib.parse
import urllib.request
from socket import gaierror
from typing import IO, Any

REDIRECTS = 3


class DeliveryError(Exception):
    """Why a notification was not delivered, in words without a secret."""


def post(url: str, body: bytes, timeout_s: float) -> None:
    """POSTs the object; certificates are verified.

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
