"""Whether a program can be started on this node, found out before anything is started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import warnings
from dataclasses import replace
from typing import Optional

from worker_entry.values import Problem, Program, TaskRequest

MODULES_LIMIT = 1000
SOURCE_LIMIT = 1 << 20
_IMPORT = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([A-Za-z_][\w]*(?:\.\w+)*)", re.MULTILINE | re.ASCII)


def find_problems(requests: list[TaskRequest], cwd: str) -> list[Problem]:
    """Why tasks cannot be started in the folder `cwd`: one problem for each that cannot."""
    found = ((request.task, find_problem(request.program, cwd)) for request in requests)
    return [replace(problem, task=task) for task, problem in found if problem is not None]


def find_problem(program: Program, cwd: str) -> Optional[Problem]:
    """Why the program cannot be started in the folder `cwd`, as far as can be seen before; None if nothing is wrong."""
    if not os.path.isdir(cwd):
        return Problem("no-working-directory", f"the working directory {cwd} does not exist", "")
    if program.kind == "command":
        return _find_command_problem(program, cwd)
    if program.kind == "script":
        return _find_script_problem(os.path.join(cwd, program.target))
    package = program.target.partition(".")[0]
    if package == "worker_entry" and installed_version("tensorflow") is None:
        return Problem(
            "no-tensorflow",
            f"TensorFlow is not installed for {sys.executable}",
            "python -m pip install 'distlaunch[tensorflow]', or name the Python that has it: --python PATH",
        )
    return None


def _find_script_problem(path: str) -> Optional[Problem]:
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "__main__.py")):
            return None
        return Problem("no-program", f"{path} is a folder without a __main__.py", "name a script")
    try:
        with open(path, "rb") as stream:
            source = stream.read()
    except (OSError, ValueError) as error:  # ValueError: a null character in its name
        return Problem("no-program", f"cannot read the script {path}: {getattr(error, 'strerror', error)}", "")
    import zipfile

    if zipfile.is_zipfile(path):  # a zip application
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the task shows them
            compile(source, path, "exec", dont_inherit=True)
    except (RecursionError, MemoryError):  # a depth that only the task can tell whether it is too deep
        return None
    except SyntaxError as error:
        return Problem("syntax-error", f"{path}:{error.lineno}: {error.msg}", "mend the script")
    except ValueError as error:  # null bytes
        return Problem("syntax-error", f"{path}: {error}", "mend the script")
    return None


def _find_command_problem(program: Program, cwd: str) -> Optional[Problem]:
    if find_command(program.target, dict(os.environ), cwd) is not None:
        return None
    path = os.path.join(cwd, program.target)
    if os.sep not in program.target:
        return Problem("no-program", f"no program {program.target!r} on PATH", "give its path, or extend PATH")
    if not os.path.exists(path):
        return Problem("no-program", f"there is no program {path}", "")
    return Problem("not-executable", f"{path} is not executable", f"chmod +x {path}")


def may_import(program: Program, cwd: str, packages: tuple[str, ...]) -> bool:
    """Whether a Python program may import one of these packages: itself, or by modules in its own folder.

    Only what can be read is judged, and only by its words: True where nothing is known.
    """
    words = re.compile(rb"\b(?:" + "|".join(packages).encode() + rb")\b")
    if program.kind == "module":
        folder, queue = cwd, [os.path.join(*program.target.split("."))]
        queue += [os.path.join(queue[0], "__main__")]
    else:
        try:
            path = os.path.realpath(os.path.join(cwd, program.target))
        except ValueError:  # a null byte
            return True
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
        if words.search(source):
            return True
        for module in _IMPORT.findall(source):
            queue += [path for path in [os.path.join(*module.decode("ascii").split("."))] if path not in seen]
    return not found or bool(queue)


def find_command(name: str, env: dict[str, str], cwd: str) -> Optional[str]:
    """The executable file that the command's name stands for, in `cwd` and on the environment's PATH."""
    if os.sep in name:
        path = os.path.join(cwd, name)
        return path if os.path.isfile(path) and os.access(path, os.X_OK) else None
    import shutil

    return shutil.which(name, path=env.get("PATH"))


def installed_version(package: str) -> Optional[str]:
    """The version of an installed package, without importing it."""
    if importlib.util.find_spec(package) is None:
        return None
    # What `importlib.metadata` would say, which takes longer to import than all else that an agent does first.
    versions: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):  # not every entry is a folder
            for entry in os.listdir(folder or os.curdir):
                name, _, version = entry.partition("-")
                if version.endswith(".dist-info"):
                    versions.setdefault(name.lower(), version.removesuffix(".dist-info"))
    names = (package, f"{package}_cpu", f"{package}_macos", f"{package}_gpu", "tf_nightly")
    return next((versions[name] for name in names if name in versions), "unknown")
