"""The documents of the project, and their parts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.harness.places import ROOT

JAX_PAGE = ROOT / "cluster_specs" / "tensorflow_to_jax.md"
PAGES = [
    ROOT / ".github" / "ARCHITECTURE.md",
    ROOT / ".github" / "CONTRIBUTING.md",
    *(ROOT / folder / "README.md" for folder in (".", "cluster_specs", "launcher", "launcher/cli")),
    *(ROOT / folder / "README.md" for folder in ("worker_entry", "docker", "tests")),
    JAX_PAGE,
]
"""The documents to check; the changelog may name options that no longer exist."""
README = ROOT / "README.md"
COMMANDS_PAGE = ROOT / "launcher" / "cli" / "README.md"


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def prose(path: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", read(path), flags=re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str = r"\w*") -> list[str]:
    """The blocks of code."""
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", read(path), flags=re.MULTILINE | re.DOTALL)


def section(path: Path, anchor: str) -> str:
    """The text below the heading with this anchor, up to the next heading."""
    parts = re.split(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        if re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") == anchor:
            return text
    raise AssertionError(f"{path} has no section {anchor}")


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, without their headings."""
    found: list[list[str]] = []
    for table in re.findall(r"(?:^\|.*\|\n?)+", text, flags=re.MULTILINE):
        lines = table.strip().splitlines()
        assert set(lines[1]) <= set("|-"), f"no heading: {lines[0]}"
        found += [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert found
    return found


def code(cell: str) -> list[str]:
    """The parts of a cell in backticks."""
    return re.findall(r"`([^`]+)`", cell)


# --- launcher/README.md ---


LAUNCHER_PAGE = ROOT / "launcher" / "README.md"
