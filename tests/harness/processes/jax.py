"""Runs programs with JAX, in a Python that need not be the one that runs the tests."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.available import find_program
from tests.harness.places import PROGRAMS

PYTHON = os.environ.get("DISTLAUNCH_JAX_PYTHON", sys.executable)
"""A Python that has JAX, Keras and TensorFlow."""


@functools.cache
def has_jax() -> bool:
    show = "import importlib.util as util; print(all(map(util.find_spec, ('jax', 'keras', 'tensorflow'))))"
    return find_program(PYTHON, "-c", show, output=b"True\n") is not None


LOOK = str(PROGRAMS / "jax_look.py")
"""Connects itself, and prints what it has become."""


def read_look(log: str) -> dict[str, Any]:
    """What a process of `LOOK` has printed."""
    line = next(line for line in log.splitlines() if line.startswith("look "))
    found: dict[str, Any] = json.loads(line.removeprefix("look "))
    return found


def skip_without_jax() -> None:
    if not has_jax():
        pytest.skip("no Python with JAX, Keras and TensorFlow: name it in DISTLAUNCH_JAX_PYTHON")


def make_python(folder: Path) -> str:
    """Makes an interpreter with all packages of that Python in one folder; returns its path."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    show = "import sys; print(*(place for place in sys.path if place.endswith('-packages')), sep='\\n')"
    python = str(folder / "bin" / "python")
    [own, *_], places = (
        subprocess.run([each, "-c", show], capture_output=True, check=True, text=True).stdout.splitlines()
        for each in (python, PYTHON)
    )
    for place in map(Path, places):
        for package in place.iterdir():
            if package.suffix != ".pth" and not (link := Path(own, package.name)).exists():
                link.symlink_to(package)
    return python


def write_spec(folder: Path, program: str, *args: str, workers: int = 2, rest: str = "", python: str = PYTHON) -> str:
    """Writes a spec with this script of the tests' programs; returns its path."""
    path = folder / "spec.yaml"
    words = ", ".join(f"'{word}'" for word in args)
    path.write_text(
        f"framework: jax\nnodes: [{{host: local, tasks: {{worker: {workers}}}, python: {python}}}]\n"
        f"program: {{script: {program}, args: [{words}]}}\n{rest}"
    )
    return str(path)
