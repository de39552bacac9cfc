"""Files of configuration, and runs that read them."""

from __future__ import annotations

from pathlib import Path

import pytest

SPEC = """\
nodes: [{host: gpu-d, tasks: {worker: 2}}]
program: {script: x.py}
restart: {max_restarts: 1}
env: {A: spec}
"""


def make_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a spec, and a folder for the file of defaults, to which the environment variables point."""
    monkeypatch.delenv("DISTLAUNCH_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "config" / "distlaunch").mkdir(parents=True)
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def write(folder: Path, text: str) -> str:
    """Writes the file of defaults; returns its path."""
    path = folder / "config" / "distlaunch" / "config.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)
