"""Records the exception that ends a program: which one, where in the user's own code, and at which moment."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sysconfig
import time
import traceback
from dataclasses import asdict
from typing import Optional

from worker_entry.values import CrashRecord

MESSAGE_LIMIT = 20_000
"""Characters of an exception's message that a crash record keeps; the log has all of it."""
_HEAD = 4_000
"""Those of the beginning; the rest are of the end, where TensorFlow says what went wrong."""
_CUT = "\n… (cut here; the log has all of it)\n"

_CYTHON = (".pyx", ".pxd", ".pxi")
_PACKAGES = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))


def write(path: str, error: BaseException, thread: Optional[str]) -> None:
    """Writes the record of an exception that was raised just now, in the named thread or, if None, in the main one.

    Raises:
        Exception: it could not be written; nothing of it is left.
    """
    now = time.time()
    temporary = f"{path}.{os.getpid()}"
    message = _message(error)
    file, line = _user_line(error, message)
    record = CrashRecord(
        time=now,
        exception=_writable(type(error).__qualname__),
        message=_writable(message),
        file=None if file is None else _writable(file),
        line=line,
        thread=None if thread is None else _writable(thread),
    )
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as stream:
            json.dump(asdict(record), stream)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _message(error: BaseException) -> str:
    try:
        message = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
    except Exception:  # noqa: BLE001 - the program's own method, which may do anything
        return "<exception str() failed>"  # as tracebacks have it
    if len(message) <= MESSAGE_LIMIT:
        return message
    return f"{message[:_HEAD]}{_CUT}{message[_HEAD + len(_CUT) - MESSAGE_LIMIT :]}"


def _writable(text: str) -> str:
    """Without lone surrogates, which cannot be written as UTF-8: file names have them, and what was read from such."""
    return text.encode("utf-8", "backslashreplace").decode()


def _user_line(error: BaseException, message: str) -> tuple[Optional[str], Optional[int]]:
    """The innermost place in the user's own code: not in the standard library, nor in an installed package."""
    paths = sysconfig.get_paths()
    libraries = tuple({os.path.join(paths[key], "") for key in ("stdlib", "platstdlib", "purelib", "platlib")})
    here = os.path.dirname(__file__)  # the mended functions of Keras are of here; the demo, a folder below, is not

    def is_theirs(file: str) -> bool:
        return not (
            file.startswith((*libraries, "<"))
            or "__autograph_generated_file" in file  # what TensorFlow made of the user's function, and removes again
            or os.path.dirname(file) == here
            or any(folder in file for folder in _PACKAGES)
            or file.endswith(_CYTHON)  # named as on the machine where the package was built
            or not _is_there(file)
        )

    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and is_theirs(error.filename):
        return error.filename, error.lineno
    frames = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    # TensorFlow puts the traceback of a function that failed in its runtime into the message, one for each failure.
    quoted = [
        [(file, int(line)) for file, line in re.findall(r'^ *File "(.+)", line (\d+)', trace, re.MULTILINE)]
        for trace in message.split("Detected at node ")
    ]
    for trace in (*quoted, places):
        for file, line in reversed(trace):
            if is_theirs(file):
                return file, line
    return None, None


def _is_there(file: str) -> bool:
    """Whether the file exists, or is in an archive that does."""
    while file and not os.path.exists(file):
        file = os.path.dirname(file.rstrip(os.sep))
    return os.path.isfile(file)
