"""The command line in the tests' own process, for commands that start nothing: it saves them the start of Python."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from launcher.cli.main import run_command
from tests.harness.rules.inherited import kept_limits


def run_here(*arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
    """How the command ends, and what it writes."""
    done = run_here_bytes(*arguments, cwd=cwd, env=env)
    stdout, stderr = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return CompletedProcess(arguments, done.returncode, stdout, stderr)


def run_here_bytes(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> CompletedProcess[bytes]:
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape") as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="surrogateescape") as stderr,
        pytest.MonkeyPatch.context() as patch,
        kept_limits(),
    ):
        if cwd is not None:
            patch.chdir(cwd)
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            status = run_command([*arguments])
        written = []
        for stream in (stdout, stderr):  # files and no buffers, because some commands write to descriptors
            stream.seek(0)
            written.append(bytes(stream.buffer.read()))
        return CompletedProcess(arguments, status, *written)
