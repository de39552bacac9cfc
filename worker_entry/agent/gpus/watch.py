"""An agent's side of the process that reads its GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from typing import Annotated

from worker_entry.agent.helpers.helper import HelperProcess
from worker_entry.protocol.field_limits import Items
from worker_entry.protocol.framing import ProtocolError, parse
from worker_entry.protocol.samples import GpuSample
from worker_entry.system import hardware
from worker_entry.system.nvml import LIBRARY

FIRST_PAUSE_S = 60.0
"""A reader that has ended is started again after this time, which doubles with every start."""
LATE_S = 5.0
"""A reading expires when the next one is later than expected by the interval between them plus this time."""
DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Devices that show that there are GPUs: the driver's, and that of the Windows Subsystem for Linux."""


class GpuWatch:
    """Holds the last reading. `pids` contains the reader's process, so that others can exempt it from a stop."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.helper = HelperProcess(selector, self._take, lambda _: None)
        """The reader's process."""
        self.pids = self.helper.pids
        self._gpus: list[GpuSample] = []
        self._expires = 0.0
        self._start_due = 0.0 if _may_have_gpus() else float("inf")
        self._pause_s = FIRST_PAUSE_S

    def poll(self, now: float, sample_s: float) -> list[GpuSample]:
        """The last reading, or nothing if it has expired; `now` is in monotonic seconds."""
        if not self.helper.is_running and now >= self._start_due:
            self._start_due = now + self._pause_s
            self._pause_s *= 2
            with contextlib.suppress(OSError):
                self.helper.start(["gpus", str(sample_s)])
        return self._gpus if now < self._expires else []

    def end(self) -> None:
        """Kills the reader, and does not wait for it: a driver that hangs may keep it alive."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.helper.forget()

    def _take(self, line: bytes) -> None:
        """Takes a reading; ignores what libraries print between readings."""
        with contextlib.suppress(ValueError, KeyError, TypeError, ProtocolError):
            fields = json.loads(line)
            gpus = parse(Annotated[list[GpuSample], Items(256)], fields["gpus"], "gpus")
            self._expires = time.monotonic() + 2 * float(fields["next_s"]) + LATE_S
            self._gpus = gpus


def _may_have_gpus() -> bool:
    """Whether it is worth a process to look for GPUs."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    libraries = (os.path.join(folder, LIBRARY) for folder in folders if folder)
    return hardware.visible_gpus() != [] and (
        any(map(os.path.exists, (*DEVICES, *libraries))) or hardware.has_nvidia_smi()
    )
