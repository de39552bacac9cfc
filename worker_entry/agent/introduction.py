"""What an agent does first: it makes the run's folder, and says what it is."""

from __future__ import annotations

import os
import sys
from typing import Optional

from worker_entry.program.versions import installed_version
from worker_entry.protocol.file_names import make_private_directory
from worker_entry.protocol.messages import Ready
from worker_entry.protocol.orders import VERSION
from worker_entry.protocol.values import Problem
from worker_entry.system import clock, hardware
from worker_entry.system.machine import process_view


def make_run_directory(path: str, *, is_ours: bool) -> Optional[Problem]:
    """Makes the folder of a run's files; returns why that fails. `is_ours`: the user has not chosen it."""
    try:
        make_private_directory(path)
    except OSError as error:
        hint = "make it writable" if is_ours else "choose another directory"
        return Problem("run-directory", f"{error.filename}: {error.strerror}", hint)
    return None


def introduce(reattach_folder: Optional[str]) -> Ready:
    """The agent's first message; through `reattach_folder` a controller can come back to it."""
    return Ready(
        version=VERSION,
        pid=os.getpid(),
        hostname=hardware.hostname(),
        python=sys.version.split()[0],
        executable=sys.executable,
        time=clock.now(),
        cores=hardware.cores(),
        gpus=hardware.gpus(),
        tensorflow=installed_version("tensorflow"),
        reattach_folder=reattach_folder,
        process_view=process_view(),
    )
