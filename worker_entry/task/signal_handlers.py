"""Records whether this program handles SIGTERM and SIGINT, and removes TensorFlow's own handler in its children.

TensorFlow handles SIGTERM itself once a cluster has formed, in C++ and without effect on the program, so the kernel's
list of caught signals does not show whether the program has a handler. A forked child inherits that handler, but not
the thread that would act on it: `Pool.terminate()` would do nothing, and its parent would wait for ever.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Optional

_IGNORED = (signal.SIG_DFL, signal.SIG_IGN)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def restore_in_children() -> None:
    """Makes forked children end by the signals that end a process, unless Python handles them."""
    os.register_at_fork(after_in_child=_restore)


def _restore() -> None:
    for signum in _ENDING:
        if signal.getsignal(signum) == signal.SIG_DFL:
            with contextlib.suppress(ValueError, OSError):  # ValueError: this is not Python's main thread
                signal.signal(signum, signal.SIG_DFL)


def watch_term_handlers(path: str) -> None:
    """Patches Python to create the file before the program handles SIGTERM, waits for signals, or runs `exec`.

    The whole standard library calls the functions that are patched here.
    """
    path = os.path.abspath(path)
    low_level: Any = importlib.import_module("_signal")  # functions imported from `signal` earlier also call it
    _note_before(low_level, "signal", path, lambda signum, new: signum == signal.SIGTERM and new not in _IGNORED)
    for name in {"sigwait", "sigwaitinfo", "sigtimedwait"} & {*dir(signal)}:
        _note_before(signal, name, path)
    for name in ("execv", "execve"):
        _note_before(os, name, path)


class _NotingInterrupt:
    """Python's own handler of SIGINT, except that it creates a file before it raises KeyboardInterrupt.

    The traceback has no frame of ours: the property has returned when Python calls the original handler.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._process = os.getpid()
        self._original = signal.default_int_handler

    @property
    def __call__(self) -> Callable[[int, Optional[FrameType]], NoReturn]:
        if os.getpid() == self._process:  # not in a child that the program has forked
            _create(self._path)
        return self._original


def watch_interrupts(path: str) -> None:
    """Creates the file when SIGINT raises KeyboardInterrupt, or before the program sets a handler of its own."""
    original = signal.default_int_handler
    if signal.getsignal(signal.SIGINT) is not original:  # it is ignored, as below `nohup` or in a shell's background
        return
    low_level: Any = importlib.import_module("_signal")
    handler: Any = _NotingInterrupt(os.path.abspath(path))
    signal.signal(signal.SIGINT, handler)
    signal.default_int_handler = low_level.default_int_handler = handler  # some programs compare with it
    known = (*_IGNORED, handler, original)
    _note_before(low_level, "signal", handler._path, lambda signum, new: signum == signal.SIGINT and new not in known)


def note_term_handler(path: str) -> None:
    """Creates the file because a library handles SIGTERM for the program."""
    _create(os.path.abspath(path))


def _create(path: str) -> None:
    with contextlib.suppress(OSError):  # such as a full disk: the program must continue
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def _note_before(module: Any, name: str, path: str, is_noted: Callable[..., bool] = lambda *_, **__: True) -> None:
    call = getattr(module, name)

    @functools.wraps(call)
    def noting(*arguments: Any, **keywords: Any) -> Any:
        if is_noted(*arguments, **keywords):
            _create(path)
        return call(*arguments, **keywords)

    setattr(module, name, noting)
