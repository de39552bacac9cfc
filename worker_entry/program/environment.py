"""Finds the variables that a program sets before it imports TensorFlow, as far as its source shows them.

An early import must see the same variables as the program's own import. Most programs set variables to constants, in
plain statements above the import: these values are known before the program runs. If a program sets variables in
another way, nothing is imported early.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Optional, Union

from worker_entry.program.import_variables import LATE, READ, ProgramEnv
from worker_entry.protocol.values import Program

SOURCE_LIMIT = 1 << 20
MODULES_LIMIT = 100


def find_program_env(program: Program, cwd: str, env: dict[str, str], packages: tuple[str, ...]) -> ProgramEnv:
    """Finds how a Python program changes its environment before it imports one of the packages.

    Args:
        program: a script or a module.
        cwd: the folder in which the program runs.
        env: the environment with which the program is started.
        packages: the search ends at the first import of one of these packages.
    """
    try:
        folder, file = _find_file(program, cwd)
    except ValueError:  # not a valid file name
        return ProgramEnv()
    reader = _Reader(folder, cwd, env, packages)
    with contextlib.suppress(_Reached):
        reader.read(file)
    return reader.found


def _find_file(program: Program, cwd: str) -> tuple[str, str]:
    """Returns the folder that the program searches first for modules, and the file that runs first."""
    if program.kind == "module":
        file = os.path.join(cwd, *program.target.split("."))
        return cwd, os.path.join(file, "__main__.py") if os.path.isdir(file) else f"{file}.py"
    file = os.path.realpath(os.path.join(cwd, program.target))
    if os.path.isdir(file):
        return file, os.path.join(file, "__main__.py")
    return os.path.dirname(file), file


class _Reached(Exception):  # noqa: N818 - not an error: the import has been found
    """The program imports one of the packages here."""


class _Reader:
    """Reads a program's statements in the order in which they run."""

    def __init__(self, folder: str, cwd: str, env: dict[str, str], packages: tuple[str, ...]) -> None:
        self.found = ProgramEnv()
        self._folder = folder
        self._cwd = cwd
        self._env = env
        self._packages = packages
        self._seen: set[str] = set()

    def read(self, file: str) -> None:
        if file in self._seen or len(self._seen) >= MODULES_LIMIT:
            return
        self._seen.add(file)
        try:
            with open(file, "rb") as stream:
                tree = ast.parse(stream.read(SOURCE_LIMIT))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return  # the task reports it
        self._run(tree.body, os.path.basename(file), sure=True)

    def _run(self, statements: Iterable[ast.stmt], file: str, *, sure: bool) -> None:
        """`sure`: whether the statements certainly run."""
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue  # changes by functions are compared when the program imports TensorFlow
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                self._follow(statement)
            elif isinstance(statement, ast.If):
                is_main = "__name__" in {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)}
                self._run(statement.body, file, sure=sure and is_main)
                self._run(statement.orelse, file, sure=False)
            elif isinstance(statement, (ast.For, ast.While)):
                self._run([*statement.body, *statement.orelse], file, sure=False)
            elif isinstance(statement, ast.With):
                self._run(statement.body, file, sure=sure)
            elif isinstance(statement, ast.Try):
                self._run(statement.body, file, sure=sure)
                for handler in statement.handlers:
                    self._run(handler.body, file, sure=False)
                self._run([*statement.orelse, *statement.finalbody], file, sure=sure)
            else:
                self._note(statement, file, sure=sure)

    def _follow(self, statement: Union[ast.Import, ast.ImportFrom]) -> None:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            module = "." * statement.level + (statement.module or "")
            names = [module, *(f"{module}.{alias.name}" for alias in statement.names)]
        for name in names:
            if name.partition(".")[0] in self._packages:
                raise _Reached
            path = os.path.join(self._folder, *name.lstrip(".").split("."))
            for file in (f"{path}.py", os.path.join(path, "__init__.py")):
                if os.path.isfile(file):
                    self.read(file)

    def _note(self, statement: ast.stmt, file: str, *, sure: bool) -> None:
        for name, value in _changes(statement, self._now()):
            if name == _DOTENV:
                for variable in self._names_of_dotenv():
                    self._set(variable, _UNKNOWN, f"{file}:{statement.lineno}", sure=False)
            else:
                self._set(name, value, f"{file}:{statement.lineno}", sure=sure)

    def _set(self, name: str, value: _Value, place: str, *, sure: bool) -> None:
        if not name:
            return
        if isinstance(value, _Unknown) or not sure:
            if READ.match(name) and name not in LATE and (sure or value != self._now().get(name)):
                self.found.unclear[name] = place
        else:
            self.found.changes[name] = value

    def _now(self) -> dict[str, str]:
        return self.found.over(self._env)

    def _names_of_dotenv(self) -> Iterator[str]:
        """Yields the names in files that python-dotenv may read: the first `.env` upwards from each start folder."""
        for folder in (self._folder, self._cwd):
            while True:
                with contextlib.suppress(OSError), open(os.path.join(folder, ".env"), encoding="utf-8") as stream:
                    yield from _DOTENV_LINE.findall(stream.read(SOURCE_LIMIT))
                    break
                folder, below = os.path.dirname(folder), folder
                if folder == below:
                    break


class _Unknown:
    """A value that is known only when the program runs."""


_UNKNOWN = _Unknown()
_DOTENV = "load_dotenv()"
_DOTENV_LINE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*=", re.MULTILINE)
_Value = Union[str, None, _Unknown]


def _changes(statement: ast.stmt, now: dict[str, str]) -> Iterator[tuple[str, _Value]]:
    """Yields the names and values that the statement sets; `now`: the variables before the statement."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                value = _UNKNOWN if isinstance(statement, ast.AugAssign) else _text(statement.value)
                yield _name(target.slice), value
            elif isinstance(statement, ast.AugAssign) and _is_environ(target):  # os.environ |= {…}
                yield from _items(statement.value)
    elif isinstance(statement, ast.Delete):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield _name(target.slice), None
    for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
        yield from _changes_of_call(call, now)


def _changes_of_call(call: ast.Call, now: dict[str, str]) -> Iterator[tuple[str, _Value]]:
    function = call.func
    called = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    if called == "load_dotenv":
        yield _DOTENV, None
    elif called in ("putenv", "unsetenv") and call.args:
        yield _name(call.args[0]), _text(call.args[1]) if called == "putenv" and len(call.args) > 1 else None
    elif isinstance(function, ast.Attribute) and _is_environ(function.value):
        if called == "update":
            for argument in call.args:
                yield from _items(argument)
            for keyword in call.keywords:
                yield keyword.arg or "", _text(keyword.value)
        elif called == "setdefault" and call.args:
            name = _name(call.args[0])
            yield name, now[name] if name in now else _text(call.args[1]) if len(call.args) > 1 else _UNKNOWN
        elif called == "pop" and call.args:
            yield _name(call.args[0]), None
        elif called == "clear":
            for name in now:
                yield name, _UNKNOWN


def _items(mapping: Optional[ast.expr]) -> Iterator[tuple[str, _Value]]:
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values):  # noqa: B905 - Python 3.9 has no `strict`
            yield (_name(key) if key is not None else ""), _text(value)
    else:
        yield "", _UNKNOWN


def _name(node: ast.expr) -> str:
    """Returns the variable's name; empty if the name is known only when the program runs."""
    value = _text(node)
    return value if isinstance(value, str) else ""


def _text(node: Optional[ast.expr]) -> _Value:
    """Returns the text of a constant expression; `_UNKNOWN` for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
    ):
        return str(node.args[0].value)
    return _UNKNOWN


def _is_environ(node: Optional[ast.expr]) -> bool:
    """Whether the expression is `os.environ` or `environ`."""
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
