"""A headless Chromium, driven over the DevTools protocol through a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
ANSWER_S = 60.0
_LEND = """\
import fcntl, os, sys
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for place, descriptor in enumerate(high, 3):
    os.dup2(descriptor, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Moves the pipes to descriptors 3, from which the browser reads, and 4, to which it writes; then executes it."""

Event = dict[str, Any]


class Browser:
    """One page of a browser. `events`: all events received so far, in order."""

    def __init__(self, writing: int, reading: int) -> None:
        self.events: list[Event] = []
        self._writing, self._reading = writing, reading
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._writing, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, page: Path, *, within_s: float = ANSWER_S) -> None:
        """Opens a file, and waits until it is loaded."""
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + within_s
        while not self.told("Page.loadEventFired"):
            assert time.monotonic() < deadline, "the page was not loaded"
            self.events.append(self._read())

    def told(self, method: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def run(self, script: str) -> Any:
        """The value of an expression; for a promise, its value once it is resolved."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str | None:
        """The text of the first element that the selector finds."""
        found: str | None = self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? null")
        return found

    def complaints(self) -> list[Any]:
        """The errors and warnings that the browser's console would show."""
        logged = [each["entry"] for each in self.told("Log.entryAdded")]
        said = [each for each in self.told("Runtime.consoleAPICalled") if each["type"] in ("error", "warning")]
        return [*logged, *said, *self.told("Runtime.exceptionThrown")]

    def requests(self) -> list[str]:
        """The requested URLs."""
        return [each["request"]["url"] for each in self.told("Network.requestWillBeSent")]

    def colours(self, scheme: str) -> None:
        """Sets the preferred colour scheme, `light` or `dark`."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of the visible part, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._reading], [], [], ANSWER_S)[0], "the browser does not answer"
            data = os.read(self._reading, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def open_browser(folder: Path, *flags: str) -> Iterator[Browser]:
    """A browser with an empty profile in `folder`."""
    assert CHROMIUM is not None
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    command: Sequence[str] = (CHROMIUM, *FLAGS, f"--user-data-dir={folder}", *flags, "about:blank")
    with (folder.with_suffix(".stderr")).open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", _LEND, str(read_there), str(write_there), *command],
            pass_fds=(read_there, write_there),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
        )
    os.close(read_there)
    os.close(write_there)
    try:
        browser = Browser(write_here, read_here)
        yield browser
        with contextlib.suppress(OSError, AssertionError):
            browser._session = ""
            browser.call("Browser.close")
    finally:
        os.close(write_here)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read_here)
