"""An older version of distlaunch: a copy of this one in a folder, with another protocol, and further changes."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.harness.places import ROOT
from worker_entry.protocol.orders import VERSION

PACKAGES = ("launcher", "worker_entry")
OLDER_PROTOCOL = VERSION - 1


class OlderVersion:
    """Commands run with `env` belong to this version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"PYTHONPATH": str(folder)}
        _copy(folder)
        self.change("worker_entry/protocol/orders.py", f"VERSION = {VERSION}\n", f"VERSION = {OLDER_PROTOCOL}\n")

    def change(self, path: str, old: str, new: str) -> None:
        """Replaces a text in a module, or in all modules of a folder."""
        place = self.folder / path
        changed = 0
        for file in [place] if place.is_file() else place.rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            changed += source.count(old)
            file.write_text(source.replace(old, new), encoding="utf-8")
        assert changed

    def upgrade(self) -> None:
        """Installs the newer version in place of this one, as pip does."""
        for package in PACKAGES:
            shutil.rmtree(self.folder / package)
        _copy(self.folder)


def _copy(folder: Path) -> None:
    """Copies no times: files that an installer writes are new, and a file system may give them the old inodes."""
    no_caches = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=no_caches, copy_function=shutil.copyfile)
