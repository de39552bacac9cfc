"""Folders of files that are collected."""

from __future__ import annotations

from pathlib import Path

from launcher.controller.collect.folder import CollectedFolder

# --- a folder that grows ---


def folder(root: Path, before: Path | None = None) -> CollectedFolder:
    return CollectedFolder(root / "to", root / ".parts", "gpu-a", before)
