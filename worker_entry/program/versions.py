"""Versions of installed packages, and whether our own has been replaced."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import Optional

import worker_entry

Files = dict[str, tuple[int, int]]


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


def read_own_files() -> Files:
    """The inode and the time of each folder's `__init__.py` in our package: installing another version changes them."""
    found: Files = {}
    for folder in (*worker_entry.__path__, *_folders(worker_entry.__path__[0])):
        path = os.path.join(folder, "__init__.py")
        with contextlib.suppress(OSError):  # it is being replaced
            facts = os.stat(path)
            found[path] = facts.st_ino, facts.st_mtime_ns
    return found


def _folders(top: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir())
    return []
