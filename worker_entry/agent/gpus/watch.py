"""An agent's side of the process that reads its GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
import time
from typing import Annotated, Optional

from worker_entry.protocol.field_limits import Items
from worker_entry.protocol.file_names import PACKAGE
from worker_entry.protocol.framing import ProtocolError, parse
from worker_entry.protocol.samples import GpuSample
from worker_entry.system import hardware, processes
from worker_entry.system.nvml import LIBRARY

FIRST_PAUSE_S = 60.0
"""A reader that has ended is started again after this time, which doubles with every start."""
LINE_LIMIT = 1 << 18
LATE_S = 5.0
"""A reading expires when the next one is later than expected by the interval between them plus this time."""
DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""Devices that show that there are GPUs: the driver's, and that of the Windows Subsystem for Linux."""


class GpuWatch:
    """Holds the last reading. `pids` contains the reader's process, so that others can exempt it from a stop."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.pids: set[int] = set()
        self._selector = selector
        self._pipe: Optional[int] = None
        self._buffer = b""
        self._gpus: list[GpuSample] = []
        self._expires = 0.0
        self._start_due = 0.0 if _may_have_gpus() else float("inf")
        self._pause_s = FIRST_PAUSE_S

    def poll(self, now: float, sample_s: float) -> list[GpuSample]:
        """The GPUs as last read, or none if that is too long ago; `now` is in monotonic seconds."""
        if self._pipe is None and now >= self._start_due:
            self._start_due = now + self._pause_s
            self._pause_s *= 2
            self._start(sample_s)
        return self._gpus if now < self._expires else []

    def end(self) -> None:
        """Kills the reader, and does not wait for it: a driver that hangs may keep it alive."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._close()

    def _start(self, sample_s: float) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        command = [sys.executable, PACKAGE, "gpus", str(sample_s)]
        try:
            self.pids.add(processes.spawn(command, env=dict(os.environ), cwd=os.sep, output=writer))
        except OSError:
            os.close(reader)
            return
        finally:
            os.close(writer)
        self._pipe = reader
        self._selector.register(reader, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        assert self._pipe is not None
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(self._pipe, 1 << 16)
        if not data:
            self._close()
            return
        *lines, rest = (self._buffer + data).split(b"\n")
        self._buffer = rest[-LINE_LIMIT:]
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        """Takes a reading; ignores what libraries print between readings."""
        with contextlib.suppress(ValueError, KeyError, TypeError, ProtocolError):
            fields = json.loads(line)
            gpus = parse(Annotated[list[GpuSample], Items(256)], fields["gpus"], "gpus")
            self._expires = time.monotonic() + 2 * float(fields["next_s"]) + LATE_S
            self._gpus = gpus

    def _close(self) -> None:
        if self._pipe is not None:
            self._selector.unregister(self._pipe)
            os.close(self._pipe)
        self._pipe, self._buffer = None, b""


def _may_have_gpus() -> bool:
    """Whether it is worth a process to look for GPUs."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    libraries = (os.path.join(folder, LIBRARY) for folder in folders if folder)
    return hardware.visible_gpus() != [] and (
        any(map(os.path.exists, (*DEVICES, *libraries))) or hardware.has_nvidia_smi()
    )
