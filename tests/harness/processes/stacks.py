"""Stacks of the tasks of a run."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.processes.commands import Command, distlaunch_command


@contextmanager
def running(folder: Path, *arguments: str, command: Command = distlaunch_command) -> Iterator[subprocess.Popen[bytes]]:
    """A run in the background, which is ended by Ctrl-C."""
    with (folder / "stderr").open("wb") as stderr:
        words = command("local", "--run-dir", "run", *arguments)
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)
    with process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()


def ask(folder: Path) -> str:
    asked = subprocess.run(
        distlaunch_command("stacks", "./run"), cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert asked.returncode == 0, asked.stderr
    return asked.stdout
