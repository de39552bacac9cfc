"""Versions of installed packages."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import Optional


def installed_version(package: str) -> Optional[str]:
    """Returns the version of an installed package without importing it; "unknown" if its metadata are not found."""
    if importlib.util.find_spec(package) is None:
        return None
    # Not `importlib.metadata`: its import takes longer than the rest of an agent's start.
    versions: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):  # not every entry is a folder
            for entry in os.listdir(folder or os.curdir):
                name, _, version = entry.partition("-")
                if version.endswith(".dist-info"):
                    versions.setdefault(name.lower(), version.removesuffix(".dist-info"))
    names = (package, f"{package}_cpu", f"{package}_macos", f"{package}_gpu", "tf_nightly")
    return next((versions[name] for name in names if name in versions), "unknown")
