"""Tests that run in a process of their own: they become subreapers and wait for any child, as an agent does.

Each test runs with this system's own means and, unless it needs Linux, once more with the portable fallback. It fails
if it leaves a process behind.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import psutil
import pytest

from tests.harness.places import ROOT
from tests.harness.polling import eventually

TIME_LIMIT_S = 60.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def apart(body: Callable[[], None]) -> Callable[..., None]:
    """Runs the test apart: with this system's own means, and with the portable fallback."""

    @pytest.mark.parametrize("portable", [False, True], ids=["native", "portable"])
    def run(portable: bool) -> None:
        _run(body, portable=portable)

    return _named(run, body)


def apart_on_linux(body: Callable[[], None]) -> Callable[..., None]:
    """Runs the test apart, and only on systems with subreapers, pidfds and /proc."""

    @linux
    def run() -> None:
        _run(body, portable=False)

    return _named(run, body)


def _named(run: Any, body: Callable[[], None]) -> Callable[..., None]:
    run.__name__, run.__doc__, run.body = body.__name__, body.__doc__, body
    named: Callable[..., None] = run
    return named


def _run(body: Callable[[], None], *, portable: bool) -> None:
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            if not portable:
                _do(body)
            # The fallback is chosen at import, so it takes a new interpreter.
            os.chdir(ROOT)
            os.environ["DISTLAUNCH_PORTABLE"] = "1"
            os.execv(sys.executable, [sys.executable, "-m", "tests.harness.apart", body.__module__, body.__name__])
        try:
            status = eventually(lambda: _wait(child), TIME_LIMIT_S)
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        errors.seek(0)
        assert status == 0, errors.read().decode(errors="replace")


def _wait(child: int) -> int:
    pid, status = os.waitpid(child, os.WNOHANG)
    assert pid == child, "it does not end"
    return status


def _do(body: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        try:
            body()
        finally:
            left = [process for process in psutil.Process().children(recursive=True) if _lives(process)]
            for process in left:
                process.kill()
        assert left == [], f"the test left {left}"
        status = 0
    except BaseException:  # noqa: BLE001 - the traceback is shown, and the test fails
        os.write(2, traceback.format_exc().encode())  # pytest has replaced sys.stderr
    finally:
        os._exit(status)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    _do(getattr(importlib.import_module(sys.argv[1]), sys.argv[2]).body)
