"""Runs the user's Python program in this interpreter, as `python train.py` or `python -m train` would.

The program gets its own `__main__`, `sys.argv` and `sys.path[0]`, and ends with the status that plain Python
would give it. What it gets more: `faulthandler`, the mend of Keras (`keras_support`), and, when it fails, a
crash record: a small JSON file that says which exception it was, where, and at which moment. The moment
counts: an interpreter takes about a second to shut down, so that the exit statuses of a cluster can arrive in
the wrong order.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import importlib.machinery
import io
import json
import os
import re
import runpy
import signal
import sys
import sysconfig
import threading
import traceback
import types
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Optional

from worker_entry import (
    clock,
    collective_time,
    devices,
    heartbeat,
    injecting,
    keras_progress,
    keras_support,
    progress,
    telling,
)
from worker_entry.values import CrashRecord, Injection, Program, Progress, TaskOrder

MESSAGE_LIMIT = 4000
"""Characters of an exception's message that a crash record keeps; the log has all of it."""


def run(order: TaskOrder) -> None:
    """Runs the program and returns, or raises SystemExit, as its interpreter has to end.

    Args:
        order: a script or a module, and what comes with it; a command is not run by Python.
    """
    program = order.program
    _prepare(order)
    process = os.getpid()

    threads: list[str] = []

    def record(error: BaseException, thread: Optional[str] = None) -> None:
        if thread is not None:
            threads.append(thread)
        elif threads and isinstance(error, SystemExit):
            return  # the program has noticed what happened in its thread, and that says more
        if order.crash_file is not None and os.getpid() == process:  # not in a child that the program has forked
            _write_crash(order.crash_file, error, thread)

    def finish() -> None:
        if order.finished_file is not None and os.getpid() == process:
            with contextlib.suppress(OSError):
                with open(os.open(order.finished_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
                    stream.write(repr(clock.now()))

    _watch_threads(record)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if "__annotations__" in vars(sys.modules["__main__"]):  # up to Python 3.13
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.argv = [program.target, *program.args]
    # Registered before any handler of the program's, so that it runs after them.
    interrupted = _InterruptedAtExit()
    try:
        if program.kind == "module":
            sys.argv[0] = "-m"
            _set_first_path(os.getcwd())
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # what `python -m` itself calls
        elif os.path.isdir(program.target) or zipfile.is_zipfile(program.target):
            sys.path.insert(0, os.path.join(os.getcwd(), program.target))
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # as `python DIRECTORY` does
        else:
            _run_script(program.target, main)
    except SystemExit as error:
        if _exit_status(error) != 0:
            record(error)
        else:
            finish()
        raise
    except BaseException as error:  # noqa: BLE001 - it is shown and recorded, and ends the process
        record(error)
        error.__traceback__ = _without_our_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            interrupted.by_signal = True
        # The program's exception has been shown as Python shows it; ours must not add a traceback to it.
        raise SystemExit(1) from None
    else:
        finish()


def _prepare(order: TaskOrder) -> None:
    """What the program gets more than plain Python would give it, in so far as it has to be there first."""
    faulthandler.enable(all_threads=True)
    if order.stacks_file is not None:
        telling.dump_on_signal(order.stacks_file)
    if order.status_file is not None:
        teller = telling.Teller(order.status_file)
        telling.tell_phases(teller)
        watchers: list[Callable[[Progress], None]] = []
        if order.progress:
            meter = progress.Meter(teller, collective_time.CollectiveClock().waited_s)
            progress.install(meter)
            keras_progress.install(meter)
            watchers = meter.watchers
        injecting.install(order.injections, teller, watchers)
    if order.heartbeat_s and "TF_CONFIG" in os.environ:
        heartbeat.lengthen(order.heartbeat_s)
    if os.environ.get("DISTLAUNCH_DEVICES"):
        devices.install(int(os.environ["DISTLAUNCH_DEVICES"]))
    if order.mend_keras and "TF_CONFIG" in os.environ:
        keras_support.install(_log)


def _run_script(path: str, main: types.ModuleType) -> None:
    absolute = os.path.join(os.getcwd(), path)  # which Python leaves as it is, `./` included
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    main.__dict__.update(__file__=absolute, __cached__=None, __loader__=loader)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    code = compile(source, absolute, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - running the user's program is what this module is for


def _watch_threads(record: Callable[[BaseException, str], None]) -> None:
    """Records what ends a thread of the program's, too: the main thread may wait for that one for ever."""
    show = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            record(arguments.exc_value, arguments.thread.name if arguments.thread is not None else "?")
        show(arguments)

    threading.excepthook = hook


class _InterruptedAtExit:
    """Ends the process by SIGINT, as Python does after an unhandled KeyboardInterrupt, once all exit handlers ran."""

    by_signal = False

    def __init__(self) -> None:
        atexit.register(self._end)

    def _end(self) -> None:
        if self.by_signal:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


def _set_first_path(path: str) -> None:
    # -P and PYTHONSAFEPATH (3.11) ask for no such entry.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, path)


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _without_our_frames(trace: Optional[types.TracebackType]) -> Optional[types.TracebackType]:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _write_crash(path: str, error: BaseException, thread: Optional[str]) -> None:
    now = clock.now()
    temporary = f"{path}.{os.getpid()}"
    try:
        file, line = _user_line(error)
        record = CrashRecord(
            time=now,
            exception=_writable(type(error).__qualname__),
            message=_writable(_message(error)[:MESSAGE_LIMIT]),
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
    except Exception as problem:  # noqa: BLE001 - a full disk, say: it must not hide the program's own error
        _log(f"could not write the crash record: {problem}")


def _message(error: BaseException) -> str:
    try:
        return f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
    except Exception:  # noqa: BLE001 - the program's own method, which may do anything
        return "<exception str() failed>"  # as tracebacks have it


def _writable(text: str) -> str:
    """Without lone surrogates, which cannot be written as UTF-8: file names have them, and what was read from such."""
    return text.encode("utf-8", "backslashreplace").decode()


def _user_line(error: BaseException) -> tuple[Optional[str], Optional[int]]:
    """The innermost place in the user's own code: not in the standard library, nor in an installed package."""
    paths = sysconfig.get_paths()
    libraries = tuple({os.path.join(paths[key], "") for key in ("stdlib", "platstdlib", "purelib", "platlib")})
    here = os.path.dirname(__file__)  # the mended functions of Keras are of here; the demo, a folder below, is not

    def is_theirs(file: str) -> bool:
        return not (
            file.startswith((*libraries, "<"))
            or "__autograph_generated_file" in file  # what TensorFlow made of the user's function, and removes again
            or os.path.dirname(file) == here
            or any(f"{os.sep}{folder}{os.sep}" in file for folder in ("site-packages", "dist-packages"))
        )

    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and is_theirs(error.filename):
        return error.filename, error.lineno
    frames = traceback.walk_tb(_without_our_frames(error.__traceback__))
    places = [(frame.f_code.co_filename, line) for frame, line in frames if is_theirs(frame.f_code.co_filename)]
    # TensorFlow puts the traceback of a function that failed in its runtime into the message.
    quoted = re.findall(r'^ *File "(.+)", line (\d+)', _message(error)[:MESSAGE_LIMIT], re.MULTILINE)
    places += [(file, int(line)) for file, line in quoted if is_theirs(file)]
    return places[-1] if places else (None, None)


def _log(text: str) -> None:
    with contextlib.suppress(Exception):  # the program may have closed it, and the disk may be full
        sys.stderr.write(f"distlaunch: {text}\n")
        sys.stderr.flush()


def main(arguments: Sequence[str]) -> None:
    """`task FILE`: the program is described in a JSON file, so that nothing of the user's is on a command line."""
    with open(arguments[0], encoding="utf-8") as stream:
        values = json.load(stream)
    program = Program(**values.pop("program"))
    injections = [Injection(**injection) for injection in values.pop("injections", ())]
    run(TaskOrder(program, injections=injections, **values))


def main_by_hand(arguments: Sequence[str]) -> None:
    """`run [--no-keras-mend] (SCRIPT | -m MODULE) [ARGS…]`: the same for a person, as `distlaunch plan` prints it."""
    rest = list(arguments)
    mend = "--no-keras-mend" not in rest[:1]
    if not mend:
        del rest[0]
    kind = "module" if rest[:1] == ["-m"] else "script"
    if kind == "module":
        del rest[0]
    if not rest:
        raise SystemExit("usage: python -m worker_entry run [--no-keras-mend] (SCRIPT | -m MODULE) [ARGS…]")
    run(TaskOrder(Program(kind=kind, target=rest[0], args=rest[1:]), mend_keras=mend))
