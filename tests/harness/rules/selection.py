"""Which modules of costly tests a change can break: `pytest --since REVISION` adds them to those that always run.

A module with costly tests, or its folder, names the files and folders that it exercises in COVERS. What it imports of
the product, itself or through other modules of the tests, only adds to them, and so do the programs and data files that
it names. A file that no module covers selects all modules, because it is unknown what it can break.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.harness.places import PROGRAMS, ROOT
from tests.harness.rules.import_graph import name_of, read_imports, read_modules

SELECTS_ALL = (
    ".ci",
    "pyproject.toml",
    "tests/conftest.py",  # and all that it imports
    "worker_entry/bootstrap",  # sent to each node before anything else runs there
    "worker_entry/children",  # in each Python process below a task
)
SELECTS_NONE = (
    ".ci/base",
    ".dockerignore",
    ".github",
    ".gitignore",
    "LICENSE",
    "tests/benchmarks",
)
"""Paths on which no costly test depends; documents have tests that always run."""
LISTED = {"bad_specs", "golden", "old_runs"}
"""Folders of data that tests list, and so name as a whole."""


class RevisionError(Exception):
    """Git does not know the revision, or this is no checkout; the text is git's own."""


@dataclass(frozen=True)
class Module:
    """A Python file of the tests. `covers`: files and folders of the product; `uses`: other files of the tests."""

    covers: frozenset[str]
    uses: frozenset[str]


@dataclass(frozen=True)
class Selection:
    """`modules`: the selected test modules, each with a changed file that selects it. `everything`: the changed file
    that selects all, instead."""

    modules: Mapping[str, str]
    everything: str | None = None


def select(changed: Iterable[str], modules: Mapping[str, Module]) -> Selection:
    """What the changed files select; all paths are relative to the root of the project."""
    shared = _within("tests/conftest.py", modules)  # by all tests
    within = {name: _within(name, modules) - shared for name in modules if _is_test(name)}
    covers = {
        name: frozenset().union(*(modules[file].covers for file in files if file in modules))
        for name, files in within.items()
    }
    selected: dict[str, str] = {}
    for file in sorted(changed):
        if file not in SELECTS_NONE and (file in shared or _is_below(file, SELECTS_ALL)):
            return Selection({}, file)
        found = [name for name, files in within.items() if file in files or _is_below(file, covers[name])]
        if not found and not _selects_none(file):
            return Selection({}, file)
        selected = {**dict.fromkeys(found, file), **selected}
    return Selection(dict(sorted(selected.items())))


def _within(module: str, modules: Mapping[str, Module]) -> frozenset[str]:
    """The module and all files of the tests that it uses, itself or through others."""
    found, new = {module}, [module]
    while new:
        more = modules[name].uses - found if (name := new.pop()) in modules else ()
        found.update(more)
        new.extend(more)
    return frozenset(found)


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and PurePosixPath(path).match("test_*.py")


def _is_below(path: str, places: Container[str]) -> bool:
    return path in places or any(str(folder) in places for folder in PurePosixPath(path).parents)


def _selects_none(file: str) -> bool:
    return file.endswith((".md", "/py.typed")) or _is_below(file, SELECTS_NONE) or _is_test(file)  # a test that is gone


# --- the tests on disk ---


@functools.cache
def read_tests() -> dict[str, Module]:
    """All Python files of the tests, by path."""
    known = {
        name: path for package in ("launcher", "worker_entry", "tests") for name, path in read_modules(package).items()
    }
    named: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("*"):
        if path.is_file() and path.suffix != ".pyc" and "benchmarks" not in path.parts:
            named.setdefault(_how_named(path), set()).add(_relative(path))
    return {
        _relative(path): _read(path, known, named) for name, path in known.items() if name.partition(".")[0] == "tests"
    }


def _read(path: Path, known: Mapping[str, Path], named: Mapping[str, Set[str]]) -> Module:
    source = path.read_bytes()
    is_program = PROGRAMS in path.parents
    siblings = {other.stem: other for other in path.parent.glob("*.py")}  # programs import each other by these names
    files = {**siblings, **known} if is_program else known
    imported = {
        _relative(files[found.module]) for found in read_imports(name_of(path), source, known) if found.module in files
    }
    mentioned = {file for word in re.findall(r"[\w.]+", source.decode()) for file in named.get(word, ())}
    folders = {_relative(folder / "__init__.py") for folder in path.parents if _is_inner(folder)}
    tests = {file for file in imported | mentioned | folders if file.startswith("tests/")} - {_relative(path)}
    return Module(frozenset(imported - tests | {*read_covers(source)}), frozenset(tests))


def _how_named(path: Path) -> str:
    """How tests refer to a file of theirs that they do not import."""
    folder = path.relative_to(ROOT / "tests").parts[0]
    if path.suffix == ".py" and PROGRAMS not in path.parents:
        return name_of(path)
    return folder if folder in LISTED else path.name


def _is_inner(folder: Path) -> bool:
    """Whether this is a folder of test modules, which share its COVERS."""
    return ROOT / "tests" in folder.parents and not folder.is_relative_to(PROGRAMS)


def read_covers(source: bytes) -> Iterator[str]:
    """The value of COVERS in a module's source."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "COVERS" for to in node.targets):
            yield from ast.literal_eval(node.value)


def _relative(path: Path) -> str:
    return str(PurePosixPath(path.relative_to(ROOT)))


# --- the change ---


def read_changes(revision: str) -> frozenset[str]:
    """Files that differ between the revision and the working tree, removed and untracked ones included.

    Raises RevisionError.
    """
    changed = _git("diff", "--name-only", "--no-renames", "-z", "--end-of-options", revision, "--")
    untracked = _git("ls-files", "--others", "--exclude-standard", "-z")
    return frozenset(filter(None, f"{changed}\0{untracked}".split("\0")))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RevisionError(str(error)) from error
    if done.returncode != 0:
        raise RevisionError(done.stderr.strip())
    return done.stdout
