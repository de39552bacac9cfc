"""Notes that this program may handle SIGTERM, and takes TensorFlow's own handler from its children.

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
from typing import Any

_IGNORED = (signal.SIG_DFL, signal.SIG_IGN)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def restore_in_children() -> None:
    """Makes forked children end by the signals that end a process, unless Python handles them."""
    os.register_at_fork(after_in_child=_restore)


def _restore() -> None:
    for signum in _ENDING:
        if signal.getsignal(signum) == signal.SIG_DFL:
            with contextlib.suppress(ValueError, OSError):  # ValueError: Python does not take this for the main thread
                signal.signal(signum, signal.SIG_DFL)


def watch_term_handlers(path: str) -> None:
    """Patches Python to create the file before the program handles SIGTERM, waits for signals, or runs `exec`.

    All of Python's library calls the functions that are patched here.
    """
    path = os.path.abspath(path)
    low_level: Any = importlib.import_module("_signal")  # functions imported from `signal` earlier also call it
    _note_before(low_level, "signal", path, lambda signum, new: signum == signal.SIGTERM and new not in _IGNORED)
    for name in {"sigwait", "sigwaitinfo", "sigtimedwait"} & {*dir(signal)}:
        _note_before(signal, name, path)
    for name in ("execv", "execve"):
        _note_before(os, name, path)


def _note_before(module: Any, name: str, path: str, is_noted: Callable[..., bool] = lambda *_, **__: True) -> None:
    call = getattr(module, name)

    @functools.wraps(call)
    def noting(*arguments: Any, **keywords: Any) -> Any:
        if is_noted(*arguments, **keywords):
            with contextlib.suppress(OSError):  # such as a full disk: the program's own call must continue
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        return call(*arguments, **keywords)

    setattr(module, name, noting)
