"""How a missing package is installed, by where the interpreter is."""

from __future__ import annotations

import pytest

from worker_entry.protocol.advice import advise_install


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ("/home/a/.local/pipx/venvs/distlaunch/bin/python", "pipx inject distlaunch jax keras"),
        ("/home/a/.local/share/uv/tools/distlaunch/bin/python", "uv tool install --with jax --with keras distlaunch"),
        ("/home/a/.cache/uv/archive-v0/x/bin/python", "uvx --with jax --with keras distlaunch …"),
        ("/opt/venv/bin/python", "/opt/venv/bin/python -m pip install jax keras"),
    ],
)
def test_each_installer_is_given_all_packages_in_its_own_way(python: str, command: str) -> None:
    assert advise_install("jax keras", python) == f"{command}; or name a Python that has it with --python"
