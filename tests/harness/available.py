"""Which programs and packages this machine has.

Each program is run once, because a file on PATH may forward to a missing program.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

needs_tf_keras = pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")
HAS_GPU = Path("/dev/nvidiactl").exists()
"""Whether this machine has an NVIDIA GPU that programs may use."""


@functools.cache
def find_program(name: str, *arguments: str, output: bytes | None = None) -> str | None:
    """The path of a program that ends with status 0, and prints `output` if that is given; None if there is none."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):  # not for this machine, or it hangs
        return None
    return path if done.returncode == 0 and output in (None, done.stdout) else None


def find_python(version: str) -> str | None:
    """An interpreter of a version like `3.9`: `pythonVERSION` of PATH, or one that pyenv has built."""
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    built = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    names = (f"python{version}", *map(str, built))
    found = (find_program(name, "-c", show, output=f"{version}\n".encode()) for name in names)
    return next(filter(None, found), None)


def find_compiler() -> str | None:
    return find_program("cc", "--version") or find_program("gcc", "--version")
