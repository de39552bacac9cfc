"""Runs that read from stdin."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.harness.processes.commands import distlaunch_command


def run(folder: Path, *arguments: str, stdin: Any = subprocess.DEVNULL, data: bytes | None = None) -> list[str]:
    """The lines of the tasks of a local run that succeeds."""
    command = distlaunch_command("local", "--run-dir", str(folder / "run"), *arguments)
    given: dict[str, Any] = {"stdin": stdin} if data is None else {"input": data}
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False, **given)
    assert done.returncode == 0, done.stderr.decode()
    return sorted(line.partition(" │ ")[2] for line in done.stdout.decode().splitlines())
