"""Training runs of a model in several processes, and their numbers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OLDER_KERAS = "3.11.3"
CLOSE = 1e-5
Results = dict[str, Any]


def keras_has(file: str) -> bool:
    """Whether the installed Keras has this file; Keras is not imported, which takes seconds."""
    keras = importlib.util.find_spec("keras")
    return keras is not None and keras.origin is not None and (Path(keras.origin).parent / "src" / file).exists()


def install_keras(version: str, target: Path) -> Path:
    """Installs this version of Keras beside the installed one; skips the test if pip fails."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    done = subprocess.run([*pip, f"keras=={version}"], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip could not install keras=={version}: {done.stderr.strip()[-300:]}")
    return target


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a result, with their paths in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, float(value)
        return
    for key, item in items:
        yield from leaves(item, f"{path}.{key}" if path else str(key))


def assert_agree(one: Results, other: Results, *, tolerance: float, apart_from: set[str] | None = None) -> None:
    """Asserts that two results have the same numbers; the tolerance is relative above 1, and absolute below."""
    compared = [
        {path: number for path, number in leaves(result) if not is_below(path, apart_from or set())}
        for result in (one, other)
    ]
    assert compared[0], "there is nothing to compare"
    assert compared[0].keys() == compared[1].keys()
    differences = {
        path: (number, compared[1][path])
        for path, number in compared[0].items()
        if not abs(number - compared[1][path]) <= tolerance * max(1.0, abs(number))
    }
    assert differences == {}


def is_below(path: str, parents: set[str]) -> bool:
    return any(f"{path}.".startswith(f"{parent}.") for parent in parents)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
