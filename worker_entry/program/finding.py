"""Checks whether a program can be started on this node, before anything is started."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Optional

from worker_entry.program.versions import installed_version
from worker_entry.protocol.advice import advise_install
from worker_entry.protocol.frozen import replace
from worker_entry.protocol.values import Problem, Program, TaskRequest

MODULES_LIMIT = 1000
SOURCE_LIMIT = 1 << 20
WORDS_LIMIT = 4
"""Words of a command line that a hint quotes."""
JAX_DEMO = "worker_entry.demo.train_jax"
NEEDS_JAX = ("no-jax", {"jax": "JAX", "keras": "Keras"})
NEEDS_TENSORFLOW = ("no-tensorflow", {"tensorflow": "TensorFlow"})
"""What modules of ours need: the reference of the error if it is missing, and the packages with their names."""
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([A-Za-z_][\w]*(?:\.\w+)*)", re.MULTILINE | re.ASCII)


def find_problems(requests: list[TaskRequest], cwd: str) -> list[Problem]:
    """Returns the problems of the tasks that cannot be started in the folder `cwd`, one for each task."""
    found = ((request.task, find_problem(request.program, cwd)) for request in requests)
    return [replace(problem, task=task) for task, problem in found if problem is not None]


def find_problem(program: Program, cwd: str) -> Optional[Problem]:
    """Finds why the program cannot be started in the folder `cwd`; None if no problem is found in advance."""
    if not os.path.isdir(cwd):
        return Problem("no-working-directory", f"the working directory {cwd} does not exist", "")
    if program.kind == "command":
        return _find_command_problem(program, cwd)
    if program.kind == "script":
        return _find_script_problem(program, cwd)
    if program.target.partition(".")[0] == "worker_entry":
        return _find_missing(*(NEEDS_JAX if program.target == JAX_DEMO else NEEDS_TENSORFLOW))
    return None


def _find_missing(reference: str, packages: Mapping[str, str]) -> Optional[Problem]:
    missing = [package for package in packages if installed_version(package) is None]
    if not missing:
        return None
    names = " and ".join(packages[package] for package in missing)
    return Problem(
        reference,
        f"{names} {'is' if len(missing) == 1 else 'are'} not installed for {sys.executable}",
        f"run: {advise_install(' '.join(missing), sys.executable)}",
    )


def _find_script_problem(program: Program, cwd: str) -> Optional[Problem]:
    path = os.path.join(cwd, program.target)
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "__main__.py")):
            return None
        return Problem("no-program", f"{path} is a folder without a __main__.py", "name a script")
    try:
        with open(path, "rb") as stream:
            source = stream.read()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        hint = _hint_at_missing(program, cwd, path) if isinstance(error, FileNotFoundError) else ""
        return Problem("no-program", f"cannot read the script {path}: {getattr(error, 'strerror', error)}", hint)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the task itself shows the warnings
            compile(source, path, "exec", dont_inherit=True)
    except (RecursionError, MemoryError):  # deeply nested: only the task itself shows whether too deeply
        return None
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes, up to Python 3.11.3
        import zipfile

        if zipfile.is_zipfile(path):  # a zip application
            return None
        line = getattr(error, "lineno", None)
        hint = _hint_at_other_language(program, path, source) or "correct the script"
        place = path if line is None else f"{path}:{line}"
        return Problem("syntax-error", f"{place}: {getattr(error, 'msg', error)}", hint)
    return None


def _hint_at_missing(program: Program, cwd: str, path: str) -> str:
    if hint := _hint_at_command(program, cwd):
        return hint
    folder, name = os.path.split(path)
    try:
        known = [each for each in os.listdir(folder) if each.endswith(".py")]
    except OSError:
        return ""
    import difflib

    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {os.path.join(os.path.dirname(program.target), close[0])}?" if close else ""


def _hint_at_command(program: Program, cwd: str) -> str:
    """Explains how to run a command that was taken for a script, as in `distlaunch local python train.py`."""
    if os.sep in program.target or find_command(program.target, dict(os.environ), cwd) is None:
        return ""
    hint = f"{program.target} is a command, not a script: {_render_command([program.target, *program.args])}"
    is_python = re.match(r"python[\d.]*$", program.target) is not None
    if is_python and program.args and (program.args[0] == "-m" or not program.args[0].startswith("-")):
        return f"{hint}, or simply `distlaunch local {_render_words(program.args)}`"
    return hint


def _hint_at_other_language(program: Program, path: str, source: bytes) -> str:
    first = source.partition(b"\n")[0]
    marked = first.startswith(b"#!") and b"python" not in first
    if not marked and b"\0" not in source and not path.endswith((".sh", ".bash", ".zsh")):
        return ""
    target = program.target if os.sep in program.target else os.path.join(os.curdir, program.target)
    runs = os.access(path, os.X_OK) and (marked or b"\0" in source)
    words = [target, *program.args] if runs else ["sh", program.target, *program.args]
    return f"{program.target} is not a Python script: {_render_command(words)}"


def _render_command(words: list[str]) -> str:
    return f"run it as a command: `distlaunch local -- {_render_words(words)}` (`command:` in a spec)"


def _render_words(words: list[str]) -> str:
    return " ".join([*map(shlex.quote, words[:WORDS_LIMIT]), *(["…"] if len(words) > WORDS_LIMIT else [])])


def _find_command_problem(program: Program, cwd: str) -> Optional[Problem]:
    if find_command(program.target, dict(os.environ), cwd) is not None:
        return None
    path = os.path.join(cwd, program.target)
    if os.sep not in program.target:
        here = f": {os.path.join(os.curdir, program.target)}" if os.path.isfile(path) else ""
        return Problem("no-program", f"no program {program.target!r} on PATH", f"give its path{here}, or extend PATH")
    if not os.path.exists(path):
        return Problem("no-program", f"there is no program {path}", "")
    return Problem("not-executable", f"{path} is not executable", f"chmod +x {path}")


def may_import(program: Program, cwd: str, packages: Collection[str]) -> bool:
    """Whether a Python program, or a module in its folder that it imports, may import one of these packages.

    Only searches the source for the packages' names; True if the source cannot be read.
    """
    words = re.compile(rb"\b(?:" + "|".join(packages).encode() + rb")\b")
    return any(source is None or words.search(source) for source in _read_sources(program, cwd))


def find_imports(program: Program, cwd: str, packages: Collection[str]) -> set[str]:
    """Which of these packages the import statements of the program, and of its modules in its folder, name."""
    before = rb"^[ \t]*(?:from[ \t]|import[ \t](?:[\w. \t]+,)*)[ \t]*"
    statements = {each: re.compile(before + each.encode() + rb"\b", re.MULTILINE | re.ASCII) for each in packages}
    sources = [source for source in _read_sources(program, cwd) if source]
    return {package for package, statement in statements.items() if any(map(statement.search, sources))}


def _read_sources(program: Program, cwd: str) -> Iterator[Optional[bytes]]:
    """Yields the source of the program and of each module in its folder that it imports; None if some is not known."""
    if program.kind == "module":
        folder, queue = cwd, [os.path.join(*program.target.split("."))]
        queue += [os.path.join(queue[0], "__main__")]
    else:
        try:
            path = os.path.realpath(os.path.join(cwd, program.target))
        except ValueError:  # a null byte
            yield None
            return
        folder, queue = os.path.dirname(path), [os.path.basename(path)]
    seen: set[str] = set()
    found = False
    while queue and len(seen) < MODULES_LIMIT:
        name = queue.pop()
        seen.add(name)
        source = b""
        for file in (name, f"{name}.py", os.path.join(name, "__init__.py")):
            with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, file), "rb") as stream:
                source += stream.read(SOURCE_LIMIT)
                found = True
        yield source
        for module in _IMPORT.findall(source):
            queue += [path for path in [os.path.join(*module.decode("ascii").split("."))] if path not in seen]
    if queue or not found:
        yield None


def folder_of(program: Program, cwd: str) -> str:
    """The folder that a Python program searches first for modules."""
    path = os.path.join(cwd, program.target)
    return os.path.dirname(os.path.realpath(path)) if program.kind == "script" else cwd


def find_command(name: str, env: dict[str, str], cwd: str) -> Optional[str]:
    """Finds the executable file of the command, relative to `cwd` or on the environment's PATH; None if not found."""
    if os.sep in name:
        path = os.path.join(cwd, name)
        return path if os.path.isfile(path) and os.access(path, os.X_OK) else None
    import shutil

    return shutil.which(name, path=env.get("PATH"))
