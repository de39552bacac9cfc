"""The state that a test run inherits from the shell, cron, nohup or CI that starts it, reset in one place.

A test process, and every process that a test starts, then begins as in a fresh login shell. A test that needs another
state sets it for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import locale
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PREFIXES = (
    *("DISTLAUNCH_", "TF_", "KERAS_", "JAX_", "XLA_", "SLURM", "KUBE", "NCCL_", "GRPC_", "TORCH", "OMPI_", "PMI"),
    *("LC_", "XDG_"),
)
"""Prefixes of variables that change what distlaunch does, or a program under test.

CUDA_VISIBLE_DEVICES is not one of them: it may keep the tests off the GPUs of other users.
"""
NAMES = {
    *("LANG", "LANGUAGE", "TZ", "PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONSAFEPATH", "PYTHONWARNINGS", "PYTHONUTF8"),
    *("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TPU_NAME", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
"""More such variables."""
SETTINGS = {
    *("DISTLAUNCH_NO_SKIPS", "DISTLAUNCH_QUICK_PASSED", "DISTLAUNCH_FAILED", "DISTLAUNCH_TORCH_PYTHON"),
    *("DISTLAUNCH_JAX_PYTHON", "DISTLAUNCH_RAY_PYTHON"),
    *("DISTLAUNCH_DOCKER_BUILD", "DISTLAUNCH_KUBERNETES", "DISTLAUNCH_NO_KUBERNETES", "DISTLAUNCH_RIVALS"),
    "DISTLAUNCH_VERSIONS",
}
"""The settings of the tests themselves, which stay; see README."""
LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK")
"""The names of limits of `resource`."""
_PR_SET_CHILD_SUBREAPER = 36
LOCALE = "C.UTF-8"
UMASK = 0o022
DESCRIPTORS = 4096
"""More than any test needs, and few enough for a program that closes all of them."""


def reset_inherited_state() -> None:
    """Resets this process, and so the processes that it starts."""
    _reset_signals()
    os.umask(UMASK)
    _reset_limits()
    for name in [*os.environ]:
        if name not in SETTINGS and (name in NAMES or name.startswith(PREFIXES)):
            del os.environ[name]
    os.environ["DISTLAUNCH_CONFIG"] = os.devnull  # the user's own defaults
    os.environ["LC_ALL"] = LOCALE
    with contextlib.suppress(locale.Error):  # a system without this locale
        locale.setlocale(locale.LC_ALL, LOCALE)


def _reset_signals() -> None:
    """Undoes `nohup`, `trap ''` and a shell's `&`, after which programs ignore SIGHUP, SIGINT and SIGQUIT."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kept = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGKILL, signal.SIGSTOP}  # Python ignores the first two by itself
    for number in signal.valid_signals() - kept:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _reset_limits() -> None:
    """Sets each limit to the highest allowed value, except for core files, descriptors and the stack."""
    chosen = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: DESCRIPTORS, resource.RLIMIT_STACK: 8 << 20}
    for name in LIMITS:
        number = _number_of(name)
        _, hard = resource.getrlimit(number)
        wanted = chosen.get(number, hard)
        resource.setrlimit(number, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def read_state() -> dict[str, object]:
    """The state that a test must not change, because the tests after it, and the processes that they start, inherit it.

    Omits the state that pytest and pytest-timeout change themselves.
    """
    umask = os.umask(UMASK)
    os.umask(umask)
    return {
        "umask": umask,
        "folder": Path.cwd(),
        **{f"signal {number}": signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}},
        **{f"limit {name}": limit for name, limit in _read_limits().items()},
        **{f"variable {name}": value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    }


def leave_orphans() -> None:
    """Ends the adoption of orphans, which a controller begins with its first agent on this machine.

    Otherwise, a test of the processes below its own would find those of earlier tests.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def kept_limits() -> Iterator[None]:
    """Undoes a command's changes to the limits of its process."""
    before = _read_limits()
    try:
        yield
    finally:
        for name, limit in before.items():
            resource.setrlimit(_number_of(name), limit)


def _read_limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(_number_of(name)) for name in LIMITS}


def _number_of(limit: str) -> int:
    number: int = getattr(resource, f"RLIMIT_{limit}")
    return number
