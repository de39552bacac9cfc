"""The process that reads the GPUs for an agent, because calls into the driver may hang or crash.

It prints a line of JSON for each reading: `gpus`, and `next_s`, the seconds until the next line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Optional

from worker_entry.protocol.frozen import asdict
from worker_entry.protocol.samples import GpuSample
from worker_entry.system import hardware, nvidia_smi
from worker_entry.system.nvml import GpuReading, Nvml, is_called

SHARE = 0.001
"""Share of a core that NVML may cost."""
PROGRAM_SHARE = 0.01
"""The same for nvidia-smi, which is started for each reading."""
PROGRAM_S = 10.0
"""The shortest interval between two starts of nvidia-smi."""
LONGEST_S = 60.0


def main(sample_s: float) -> None:
    """Prints readings until its output is closed; returns at once without NVML and nvidia-smi."""
    try:
        read, share = Nvml().read, SHARE
    except OSError:
        if not hardware.has_nvidia_smi():
            return
        read, share, sample_s = nvidia_smi.read_gpus, PROGRAM_SHARE, max(sample_s, PROGRAM_S)
    visible = hardware.visible_gpus()
    try:
        _print_readings(read, visible, sample_s, share)
    except ConnectionError:
        os._exit(0)  # an interpreter's shutdown would complain that it cannot flush


def _print_readings(
    read: Callable[[], list[GpuReading]], visible: Optional[Sequence[str]], sample_s: float, share: float
) -> None:
    while True:
        before = os.times()
        gpus = [asdict(sample) for sample in choose_visible(read(), visible)]
        cost_s = sum(os.times()[:4]) - sum(before[:4])
        next_s = max(sample_s, min(cost_s / share, LONGEST_S))
        print(json.dumps({"gpus": gpus, "next_s": next_s}), flush=True)
        time.sleep(next_s)


def choose_visible(readings: Sequence[GpuReading], visible: Optional[Sequence[str]]) -> list[GpuSample]:
    """Samples of the GPUs that CUDA_VISIBLE_DEVICES names, under the names that it uses; of all if it is not set."""
    chosen = []
    for reading in readings:
        name = _name_in(reading, visible)
        if name is not None:
            sizes = reading.memory or 0, reading.memory_total or 0
            chosen.append(GpuSample(name, reading.use, *sizes, reading.power_w, reading.celsius))
    return chosen


def _name_in(reading: GpuReading, visible: Optional[Sequence[str]]) -> Optional[str]:
    if visible is None:
        return str(reading.index)
    for name in visible:
        if is_called(reading, name):
            return name
    # The name of a part of a GPU does not say which GPU it belongs to.
    return str(reading.index) if any(name.startswith("MIG-") for name in visible) else None
