"""Helper processes are spared by the cleanup of a run, and a lost exit status does not count as success."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest

import launcher
from launcher import helpers
from tests.harness.apart import linux

NO_HELPERS = {"helpers.py", "transports/agent_process.py", "python/process.py"}
"""They start an agent, and the controller of a run from Python."""


def test_helper_processes_are_spared_until_they_end() -> None:
    process = helpers.start(["cat"], stdin=subprocess.PIPE)
    with helpers.spared() as pids:
        assert process.pid in pids
    assert process.stdin is not None
    process.stdin.close()
    assert helpers.wait(process, 20.0) == 0
    with helpers.spared() as pids:
        assert process.pid not in pids


def test_waiting_for_a_slow_helper_process_times_out() -> None:
    process = helpers.start(["sleep", "600"])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            helpers.wait(process, 0.05)
    finally:
        process.kill()
    assert helpers.wait(process, 20.0) == -9


@linux
def test_a_lost_exit_status_of_a_helper_process_is_an_error() -> None:
    process = helpers.start(["false"])
    os.waitpid(process.pid, 0)
    with pytest.raises(helpers.LostStatusError):
        helpers.wait(process, 20.0)


def test_only_known_launcher_modules_start_processes_directly() -> None:
    """The end of a local run would kill what another module starts."""
    folder = Path(launcher.__file__).parent
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                *("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_output"),
                *("subprocess.check_call", "os.system", "os.popen", "os.posix_spawn"),
            ):
                found.add(str(path.relative_to(folder)))
    assert found == NO_HELPERS
