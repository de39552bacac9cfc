"""The process that controls a run: its identity, whether it is alive, and what it has left on this machine.

A pid alone identifies no process: other machines, other containers and later processes may use the same pid.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import UsageError
from worker_entry.protocol import environment
from worker_entry.protocol.frozen import dataclass
from worker_entry.system.machine import boot_id, pid_namespace

START_TOLERANCE_S = 0.05
"""The kernel measures start times in hundredths of a second."""


class ElsewhereError(UsageError):
    """The controller cannot be seen from here. `place`: its machine, or its container."""

    def __init__(self, place: str, *, evidence: Sequence[str] = (), hint: str) -> None:
        super().__init__(f"this run's controller is {place}", evidence=evidence, hint=hint)
        self.place = place
        self.job = ""
        """The Slurm job on whose batch host the controller runs, if any."""


@dataclass(frozen=True)
class Controller:
    """A process, identified uniquely.

    `boot` and `pid_namespace` are empty on systems without them. `started`: seconds since the boot, which setting the
    clock does not change; Unix seconds on systems that do not count from the boot.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: float


def parse_controller(facts: Mapping[str, Any]) -> Controller:
    """The controller from its JSON object.

    Raises:
        ValueError, KeyError, TypeError: the object does not describe a process.
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
    return Controller(socket.gethostname(), boot_id(), pid_namespace(), os.getpid(), started)


def is_alive(controller: Controller) -> bool:
    """Whether the process is alive.

    Raises:
        ElsewhereError: the process cannot be seen from here.
    """
    boot = boot_id()
    if controller.boot != boot or not boot:  # another machine or boot; this machine may have been renamed
        if controller.host != socket.gethostname():
            raise ElsewhereError(
                f"on {controller.host}",
                hint=f"run the command on {controller.host}; if that machine is gone, the run's tasks stop when "
                "their lease expires",
            )
        if controller.boot != boot:
            return False
    if controller.pid_namespace != pid_namespace():
        raise ElsewhereError(
            f"in another container on {controller.host}",
            evidence=[f"its PID namespace is {controller.pid_namespace}, this one is {pid_namespace()}"],
            hint="run the command in that container",
        )
    started = _start_of(controller.pid)
    return started is not None and abs(started - controller.started) < START_TOLERANCE_S


def _start_of(pid: int) -> float | None:
    """When the process was started; None if it does not exist or is a zombie."""
    # Imported here: most commands need no process.
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return process.create_time()
        # psutil adds the boot time, which moves when the clock is set, to the kernel's count.
        while True:
            boot = psutil.boot_time()
            started = psutil.Process(pid).create_time() - boot
            if psutil.boot_time() == boot:
                return started
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None


def find_left_processes(run_id: str) -> list[int]:
    """Returns the processes of this machine that have the run's id in a readable environment."""
    import psutil  # only at the end of a run

    found = []
    for process in psutil.process_iter(["environ"]):
        variables = process.info["environ"] or {}  # None: another user's process, a zombie, or a process that has ended
        if variables.get(environment.RUN_ID) == run_id and process.pid != os.getpid():
            found.append(process.pid)
    return sorted(found)
