"""Runs whose nodes are network namespaces."""

from __future__ import annotations

from pathlib import Path

from tests.harness.commands import Ran, distlaunch_command
from tests.harness.hosts.namespaces import Network


def up(network: Network, spec: str, tmp_path: Path, env: dict[str, str] | None = None, timeout: float = 20.0) -> Ran:
    """Runs `distlaunch up` on the controller."""
    directory = tmp_path / "run"
    done = network.run(distlaunch_command("up", "--run-dir", str(directory), spec), env=env, timeout=timeout)
    return Ran(done.returncode, done.stdout, done.stderr, directory)
