"""A separate interpreter, whose runs find TensorFlow imported.

An agent is found by its interpreter (`worker_entry/agent/warm/`), so no other test and no user's run uses this one.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Container, Sequence
from pathlib import Path

import psutil

from tests.harness.polling import eventually
from worker_entry.agent.warm.rendezvous import END, WarmAgent, find_waiting

KEEP = "45m"
"""Longer than all tests take."""
LAUNCHER = ("-m", "launcher")
OPTIONS = tuple(
    word
    for variable in ("OMP_NUM_THREADS=1", "TF_NUM_INTRAOP_THREADS=1", "TF_NUM_INTEROP_THREADS=2")
    for word in ("-e", variable)
)
"""Variables that are read at import, and otherwise depend on the number of tasks: with them, each run finds the import
of the run before."""
DIFFERENT = ("PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START")
"""Variables that differ between tests; imports look through all variables."""


def make_python(folder: Path) -> str:
    """Makes an interpreter with the packages of this one; returns its path."""
    own = sys.prefix != sys.base_prefix
    base = Path(sys.base_prefix, "bin", Path(sys.executable).resolve().name)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(base)
    (folder / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = {'false' if own else 'true'}\n"
    )
    if own:
        (folder / "lib").symlink_to(Path(sys.prefix, "lib"))
    return str(folder / "bin" / "python")


_paths: set[str] = set()
"""The interpreters of this process's WarmPythons."""


def find_kept() -> set[int]:
    """The processes that wait for later runs of this process's tests: agents, their guardians and their forkservers."""
    kept = set()
    for facts in _find_waiting(_paths).values():
        with contextlib.suppress(psutil.Error):
            kept |= {facts.guardian, facts.pid, *(child.pid for child in psutil.Process(facts.pid).children())}
    return kept


def _find_waiting(executables: Container[str]) -> dict[str, WarmAgent]:
    """The agents that wait under one of these interpreters, by the paths of their sockets."""
    return {path: facts for path, facts in find_waiting() if facts.executable in executables}


def end_waiting(executable: str) -> None:
    """Ends the waiting agent of this interpreter, and no other."""
    for path in _find_waiting({executable}):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as call:
            call.connect(path)
            call.sendall(END)
    eventually(lambda: _assert_ended(executable))


def _assert_ended(executable: str) -> None:
    assert not _find_waiting({executable})


class WarmPython:
    """The interpreter at `path`, in a folder that this object may use alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = make_python(folder)
        _paths.add(self.path)
        without = [word for name in DIFFERENT for word in ("-u", name)]
        self._python = ["env", *without, self.path]

    def command(self, verb: str, *arguments: str, launcher: Sequence[str] = LAUNCHER) -> list[str]:
        """The command line of a run on this machine, with `local` or `up`, that finds TensorFlow imported."""
        if not self._find():
            self._prepare()
        return [*self._python, *launcher, verb, *OPTIONS, *arguments]

    def _prepare(self) -> None:
        (self._folder / "prepare.py").write_text("import tensorflow\n")
        run = self._folder / f"run-{len([*self._folder.iterdir()])}"
        command = [*self._python, *LAUNCHER, "local", *OPTIONS, "-n", "1", "--keep-warm", KEEP]
        command += ["--run-dir", str(run), "prepare.py"]
        subprocess.run(command, cwd=self._folder, capture_output=True, check=True)

    def end(self) -> None:
        end_waiting(self.path)

    def _find(self) -> dict[str, WarmAgent]:
        return _find_waiting({self.path})
