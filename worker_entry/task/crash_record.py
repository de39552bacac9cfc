"""Records the exception that ends a program: its class and message, its line in the user's own code, and the time."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import linecache
import os
import re
import sysconfig
import traceback
import types
from typing import Optional

from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.frozen import asdict
from worker_entry.protocol.values import CrashRecord, FirstError, SourceLine
from worker_entry.system import clock

MESSAGE_LIMIT = 20_000
"""The number of characters of an exception's message that a crash record keeps; the log has the whole message."""
_HEAD = 4_000
"""How many of these characters come from the beginning; the rest come from the end, where TensorFlow says why."""
_CUT = "\n… (cut here; the log has the whole message)\n"

_QUOTED = re.compile(r'^ *File "(.+)", line (\d+)(?:, in (.+))?$', re.MULTILINE)
_CYTHON = (".pyx", ".pxd", ".pxi")
_DEMO = os.path.join(PACKAGE, "demo", "")
"""The demo is treated like a user's program."""
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))


def write(path: str, error: BaseException, thread: Optional[str]) -> None:
    """Writes the record of an exception that was just raised, in the named thread or, if None, in the main thread.

    Raises:
        Exception: the record could not be written; no partial file is left.
    """
    now = clock.now()
    temporary = f"{path}.{os.getpid()}"
    message = _message(error)
    place = _find_place(error)
    file, line = _user_line(error, message, place)
    record = CrashRecord(
        time=now,
        exception=_writable(type(error).__qualname__),
        message=_writable(message),
        file=None if file is None else _writable(file),
        line=line,
        thread=None if thread is None else _writable(thread),
        place=place,
        exit_status=find_exit_status(error) if isinstance(error, SystemExit) else None,
        first=_find_first(error),
    )
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            json.dump(asdict(record), stream)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _find_first(error: BaseException) -> Optional[FirstError]:
    """The first of the exceptions that Python shows above this one."""
    first, seen = error, {id(error)}
    while True:
        before = first.__cause__ or (None if first.__suppress_context__ else first.__context__)
        if before is None or id(before) in seen:
            break
        first = before
        seen.add(id(first))
    if first is error:
        return None
    message = _message(first)
    file, line = _user_line(first, message, _find_place(first))
    return FirstError(
        exception=_writable(type(first).__qualname__),
        message=_writable(message),
        file=None if file is None else _writable(file),
        line=line,
    )


def find_exit_status(error: SystemExit) -> int:
    """The status with which an interpreter exits."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _message(error: BaseException) -> str:
    try:
        message = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
    except Exception:  # noqa: BLE001 - the program's own method may raise anything
        return "<exception str() failed>"  # as in Python's tracebacks
    if len(message) <= MESSAGE_LIMIT:
        return message
    return f"{message[:_HEAD]}{_CUT}{message[_HEAD + len(_CUT) - MESSAGE_LIMIT :]}"


def _writable(text: str) -> str:
    """Escapes lone surrogates, which UTF-8 cannot encode: they come from file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def _find_place(error: BaseException) -> Optional[SourceLine]:
    """The innermost line of the user's own code in the traceback."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    for number in range(len(frames) - 1, -1, -1):
        frame, line = frames[number]
        if _is_theirs(frame.f_code.co_filename):
            file = frame.f_code.co_filename
            called = frames[number + 1][0] if number + 1 < len(frames) else None
            return SourceLine(_writable(file), line, _find_call(file, line, called))
    return None


def _find_call(file: str, line: int, called: Optional[types.FrameType]) -> Optional[str]:
    """The public function that the line calls: from the next frame or, if the source calls only one, from the source.

    Keras and TensorFlow remove their own frames from a traceback. In a nested call, such as `evaluate` in a callback of
    `fit`, only frames of our patches follow. Such a frame counts if the source calls a function of the same name.
    """
    name = None if called is None else _public_name(called)
    names = _called_names(file, line)
    if called is not None and name is not None and (not _is_ours(called.f_code.co_filename) or name in names):
        return name
    return names[0] if len(names) == 1 and not names[0].startswith("_") else None


def _called_names(file: str, line: int) -> list[str]:
    """The names of the functions that the source calls on a line; empty for a line that raises."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    here = [node for node in ast.walk(tree) if getattr(node, "lineno", None) == line]
    if any(isinstance(node, ast.Raise) for node in here):
        return []
    calls = [node.func for node in here if isinstance(node, ast.Call)]
    return [getattr(call, "attr", getattr(call, "id", "_")) for call in calls]


def _public_name(frame: types.FrameType) -> Optional[str]:
    name = frame.f_code.co_name
    if name == "error_handler":  # Keras and TensorFlow wrap their functions in it, and remove the frames below
        name = getattr(frame.f_locals.get("fn"), "__name__", "")
    return name if name.isidentifier() and not name.startswith("_") else None


def _user_line(error: BaseException, message: str, place: Optional[SourceLine]) -> tuple[Optional[str], Optional[int]]:
    """The innermost line of the user's own code, from the traceback or from a traceback that the message quotes."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and _is_theirs(error.filename):
        return error.filename, error.lineno
    under_way = {
        (frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    # TensorFlow quotes tracebacks in the message: that of a function that failed in its runtime and, for each node that
    # failed, that of the node's construction. The outer part of the latter belongs to the call that built the graph,
    # not to the call that failed.
    for trace in message.split("Detected at node "):
        quoted = [found for found in _QUOTED.findall(trace) if _is_theirs(found[0])]
        if quoted:
            file, line, function = quoted[-1]
            if place is None or (file, function) not in under_way:
                return file, int(line)
            break
    return (None, None) if place is None else (place.file, place.line)


def _is_ours(file: str) -> bool:
    return file.startswith(os.path.join(PACKAGE, "")) and not file.startswith(_DEMO)


def _is_theirs(file: str) -> bool:
    """Whether the file is the user's own: not part of the standard library, an installed package or distlaunch."""
    return not (
        file.startswith((*_libraries(), "<"))
        or "__autograph_generated_file" in file  # TensorFlow makes it from the user's function, and removes it
        or _is_ours(file)
        or any(folder in file for folder in _PACKAGES)
        or file.endswith(_CYTHON)  # a path on the machine where the package was built
        or not _is_there(file)
    )


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.join(paths[key], "") for key in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_there(file: str) -> bool:
    """Whether the file exists, or is in an archive that exists."""
    while file and not os.path.exists(file):
        file = os.path.dirname(file.rstrip(os.sep))
    return os.path.isfile(file)
