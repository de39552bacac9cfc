"""The modules of the product and of the tests, and what they import, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.places import ROOT

LAUNCHER = [
    "spec",
    "plan",
    "gang",
    "verdict",
    "report",
    "proof",
    "pages",
    "console",
    "slurm",
    "kubernetes",
    "transports",
    "rundir",
    "sources",
    "exporters",
    "controller",
    "commands",
    "python",
    "cli",
]
"""Folders in the order of a run. Each may import the folders before it, and BASICS."""
WORKER_ENTRY: dict[str, set[str]] = {
    "protocol": set(),
    "system": {"protocol"},
    "program": {"protocol", "system"},
    "bootstrap": {"system"},
    "agent": {"protocol", "system", "program", "bootstrap"},
    "hooks": {"protocol", "system"},
    "keras_patches": {"protocol", "system", "hooks"},
    "task": {"protocol", "system", "program", "hooks", "keras_patches"},
    "progress": {"task"},
    "strategies": {"protocol"},
    "demo": {"progress", "strategies"},
    "children": {"task"},
    "pod": {"protocol", "program", "agent"},
    "__main__": {"agent", "pod", "task"},
}
"""Folders and modules, each with the folders and modules that it may import."""


@dataclass(frozen=True)
class Import:
    """One name that a module imports. `late`: within a function, or for type checkers only."""

    importer: str
    module: str
    late: bool


def read_modules(package: str) -> dict[str, Path]:
    """The package's modules by their full names."""
    return {name_of(path): path for path in sorted((ROOT / package).rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(name: str, source: bytes, known: Container[str]) -> Iterator[Import]:
    """Each name that the source of the module `name` imports: a module if it is `known`, otherwise what it is from."""
    yield from (Import(name, module, late) for module, late in _walk(ast.parse(source), known, late=False))


def _walk(node: ast.AST, known: Container[str], *, late: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_for_types(child)
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports are not used here"
            assert child.module is not None
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield full if full in known else child.module, inside
        yield from _walk(child, known, late=inside)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
