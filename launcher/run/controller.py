"""Which process controls a run: who it is, whether it lives, and signals to exactly this process.

A pid alone names another process on another machine, in another container, and after a while on this machine as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UsageError

START_TOLERANCE_S = 0.05
"""The kernel counts in hundredths of a second."""


@dataclass(frozen=True)
class Controller:
    """A process, by what no other process ever shares with it.

    `boot` and `pid_namespace` are empty where the system has no such thing. `started`: seconds from the boot, so that
    a clock that is set does not change it; Unix seconds on a system that does not count from the boot.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: float


def parse_controller(facts: Mapping[str, Any]) -> Controller:
    """
    Raises:
        ValueError, KeyError, TypeError: these are no facts of a process.
    """
    return Controller(
        str(facts["host"]),
        str(facts["boot"]),
        str(facts["pid_namespace"]),
        int(facts["pid"]),
        float(facts["started"]),
    )


def this_process() -> Controller:
    started = _start_of(os.getpid())
    assert started is not None
    return Controller(socket.gethostname(), _boot(), _pid_namespace(), os.getpid(), started)


def is_alive(controller: Controller) -> bool:
    """Whether the process still lives.

    Raises:
        UsageError: that cannot be seen from here.
    """
    boot = _boot()
    if controller.boot != boot or not boot:  # not this boot of this machine, whose name may have changed since
        if controller.host != socket.gethostname():
            raise UsageError(
                f"this run's distlaunch is on {controller.host}",
                hint=f"give the command on {controller.host}; if that machine is gone, the run's tasks end with their "
                "lease",
            )
        if controller.boot != boot:
            return False
    if controller.pid_namespace != _pid_namespace():
        raise UsageError(
            f"this run's distlaunch is in another container of {controller.host}",
            evidence=[f"its PID namespace is {controller.pid_namespace}, this one is {_pid_namespace()}"],
            hint="give the command in that container",
        )
    started = _start_of(controller.pid)
    return started is not None and abs(started - controller.started) < START_TOLERANCE_S


def send_signal(controller: Controller, signum: signal.Signals) -> bool:
    """Signals exactly this process; returns False if it is gone.

    Raises:
        UsageError: it cannot be signalled from here.
    """
    if not is_alive(controller):
        return False
    descriptor = _open_pidfd(controller.pid)
    try:
        # The descriptor pins the process: if it is the one that is meant now, it stays the one.
        if not is_alive(controller):
            return False
        if descriptor is None:
            os.kill(controller.pid, signum)
        else:
            signal.pidfd_send_signal(descriptor, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise UsageError(
            f"this run's distlaunch (pid {controller.pid}) belongs to another user",
            hint="give the command as that user",
        ) from None
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


def _start_of(pid: int) -> float | None:
    """When the process was started; None if there is no such process, or only what its parent has not yet collected."""
    # Imported here: most commands ask for no process.
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return process.create_time()
        # psutil adds the time of the boot, which moves when the clock is set, to what the kernel counts.
        while True:
            boot = psutil.boot_time()
            started = psutil.Process(pid).create_time() - boot
            if psutil.boot_time() == boot:
                return started
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None


def _open_pidfd(pid: int) -> int | None:
    """None where there is no such descriptor: macOS, Linux before 5.3, some sandboxes, some builds of Python."""
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        return None
    with contextlib.suppress(OSError):  # gone, which `is_alive` sees, or not supported
        return os.pidfd_open(pid)
    return None


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""
