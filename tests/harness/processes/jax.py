"""Runs programs with JAX, in a Python that need not be the one that runs the tests."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from tests.harness.available import find_program

PYTHON = os.environ.get("DISTLAUNCH_JAX_PYTHON", sys.executable)
"""A Python that has JAX, Keras and TensorFlow."""


@functools.cache
def has_jax() -> bool:
    show = "import importlib.util as util; print(all(map(util.find_spec, ('jax', 'keras', 'tensorflow'))))"
    return find_program(PYTHON, "-c", show, output=b"True\n") is not None


def write_spec(folder: Path, program: str, *args: str, workers: int = 2, rest: str = "") -> str:
    """Writes a spec with this script of the tests' programs; returns its path."""
    path = folder / "spec.yaml"
    words = ", ".join(f"'{word}'" for word in args)
    path.write_text(
        f"framework: jax\nnodes: [{{host: local, tasks: {{worker: {workers}}}, python: {PYTHON}}}]\n"
        f"program: {{script: {program}, args: [{words}]}}\n{rest}"
    )
    return str(path)
