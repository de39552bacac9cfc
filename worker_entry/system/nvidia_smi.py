"""Reads the state of the GPUs with the program nvidia-smi."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Optional

from worker_entry.system.nvml import GpuReading

FIELDS = ("index", "uuid", "utilization.gpu", "memory.used", "memory.total", "power.draw", "temperature.gpu")
TIMEOUT_S = 20.0


def query(*fields: str, option: str = "--query-gpu") -> tuple[int, str]:
    """Returns the exit status, and a line with these fields for each GPU, or for each item that the option lists.

    Without the program, or if it hangs, the status is 1 and there is no line.
    """
    command = ["nvidia-smi", f"{option}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return 1, ""
    return done.returncode, done.stdout.decode("utf-8", "replace")


def read_gpus() -> list[GpuReading]:
    """Returns the readings of all GPUs; empty if the program is missing, fails or hangs."""
    _, listing = query(*FIELDS)
    return [*parse_listing(listing)]


def find_processes() -> Optional[dict[str, list[int]]]:
    """The pids that compute on each GPU, by its UUID; None if the program does not report them."""
    status, listing = query("gpu_uuid", "pid", option="--query-compute-apps")
    if status != 0:
        return None
    found: dict[str, list[int]] = {}
    for line in listing.splitlines():
        uuid, _, pid = (part.strip() for part in line.partition(","))
        if pid.isdecimal():
            found.setdefault(uuid, []).append(int(pid))
    return found


def parse_listing(listing: str) -> Iterator[GpuReading]:
    """Yields the GPUs in a listing of FIELDS; ignores lines that name no GPU."""
    for line in listing.splitlines():
        index, *fields = [field.strip() for field in line.split(",")]
        if not index.isdecimal() or len(fields) != len(FIELDS) - 1:
            continue
        uuid, *values = fields
        use, memory, memory_total, power_w, celsius = map(_parse_number, values)
        yield GpuReading(
            int(index),
            uuid=uuid,
            use=use / 100 if use is not None else None,
            memory=int(memory) << 20 if memory is not None else None,
            memory_total=int(memory_total) << 20 if memory_total is not None else None,
            power_w=power_w,
            celsius=celsius,
        )


def _parse_number(text: str) -> Optional[float]:
    """Returns None for `[N/A]`, `[Not Supported]` and the like."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None
