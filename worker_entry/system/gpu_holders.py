"""Finds the users of this machine's GPUs: processes, and runs that have reserved a GPU.

A run reserves a GPU by a socket in Linux's abstract namespace, whose name has the GPU's UUID. Only one run can bind it,
the kernel reports its owner, and it disappears with its process. A process that connects receives the run's name.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Optional

from worker_entry.protocol.field_limits import Items, Line, Name
from worker_entry.protocol.frozen import dataclass
from worker_entry.protocol.gpus import GPUS_LIMIT, HOLDERS_LIMIT, UNKNOWN_RUN, GpuHolder
from worker_entry.system import nvidia_smi
from worker_entry.system.nvml import GpuReading, Nvml, is_called
from worker_entry.system.peer import find_peer

NAME_S = 1.0
"""How long a run that has reserved a GPU may take to send its name."""
NAME_LIMIT = 256


@dataclass(frozen=True)
class FoundGpu:
    """A GPU by its name in CUDA_VISIBLE_DEVICES, and its users. `key`: its name for all runs."""

    gpu: Name
    key: Name
    holders: Annotated[list[GpuHolder], Items(HOLDERS_LIMIT)]


@dataclass(frozen=True)
class FoundGpus:
    """GPUs, or the reason that their users are unknown."""

    gpus: Annotated[list[FoundGpu], Items(GPUS_LIMIT)]
    problem: Line = ""


def find_gpus(names: Sequence[str], own: Collection[str] = ()) -> FoundGpus:
    """Returns these GPUs, in this order.

    Args:
        names: the GPUs' names in CUDA_VISIBLE_DEVICES.
        own: the keys of GPUs that the run itself has reserved.
    """
    known = [*_read_gpus()]
    found: list[FoundGpu] = []
    for name in names:
        match = next((each for each in known if is_called(each[0], name)), None)
        if match is None or match[1] is None:
            what = f"the driver does not tell who uses GPU {name}" if known else "neither NVML nor nvidia-smi answers"
            return FoundGpus([], what)
        key = match[0].uuid or str(match[0].index)
        users = [_describe(pid) for pid in match[1][: HOLDERS_LIMIT - 1]]
        found.append(FoundGpu(name, key, users if key in own else users + find_keepers(key)))
    return FoundGpus(found)


def _read_gpus() -> Iterator[tuple[GpuReading, Optional[list[int]]]]:
    """Yields all GPUs, each with the processes that compute on it, if they are known."""
    try:
        nvml = Nvml()
    except OSError:
        processes = nvidia_smi.find_processes()
        for reading in nvidia_smi.read_gpus():
            yield reading, processes.get(reading.uuid, []) if processes is not None else None
    else:
        for reading in nvml.read():
            yield reading, nvml.read_processes(reading.index)


def _describe(pid: int) -> GpuHolder:
    user = command = ""
    with contextlib.suppress(OSError):
        user = name_user(os.stat(f"/proc/{pid}").st_uid)
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            command = stream.read().strip()
    return GpuHolder(pid, user, command)


def name_user(uid: int) -> str:
    """The user's name, or the uid if the user has no name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# --- runs that reserve a GPU ---


def keep(place: socket.socket, key: str) -> None:
    """Reserves the GPU until this Unix socket is closed; raises OSError if another run has reserved it."""
    place.bind(_address(key))
    place.listen()
    place.setblocking(False)


def tell_run(place: socket.socket, run: str) -> None:
    """Sends the run's name to the next caller of the socket."""
    with contextlib.suppress(OSError):
        caller, _ = place.accept()
        with caller:
            caller.send(run.encode()[:NAME_LIMIT], socket.MSG_DONTWAIT)


def find_keepers(key: str) -> list[GpuHolder]:
    """The run that has reserved the GPU, if there is one."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(NAME_S)
        try:
            caller.connect(_address(key))
        except ConnectionRefusedError:
            return []
        except OSError:  # its process is stopped, and has many callers
            return [GpuHolder(run=UNKNOWN_RUN)]
        peer, run = find_peer(caller), b""
        with contextlib.suppress(OSError):
            run = caller.recv(NAME_LIMIT)
    name = run.decode("utf-8", "replace") or UNKNOWN_RUN
    return [GpuHolder(run=name) if peer is None else GpuHolder(peer.pid, name_user(peer.uid), run=name)]


def _address(key: str) -> str:
    return f"\0distlaunch/gpu/{key}"
