"""What an agent first says about itself."""

from __future__ import annotations

import os
import sys
from typing import Optional

from worker_entry.program.versions import installed_version
from worker_entry.protocol.messages import Ready
from worker_entry.protocol.orders import VERSION
from worker_entry.system import clock, hardware


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
    )
