"""Optional features of the system that distlaunch uses, tried once for `distlaunch doctor`."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Optional

from worker_entry.protocol.values import MachineFacts
from worker_entry.system import hardware, kernel
from worker_entry.system.cgroups import find_file
from worker_entry.system.file_watch import FolderWatch
from worker_entry.system.isolation import enter_own_network
from worker_entry.system.nvidia_smi import query
from worker_entry.system.ports import NOBODY, attach_filter
from worker_entry.system.process_use import NodeMeter

IMPORT_S = 120
"""How long an import of TensorFlow may take; a first one from a network disk is slow."""
_COUNT_GPUS = "import tensorflow as tf; print(len(tf.config.list_physical_devices('GPU')))"


def examine() -> MachineFacts:
    """Examines this machine; takes milliseconds or, if it has GPUs, as long as an import of TensorFlow."""
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    use = NodeMeter().read([])
    has_gpus = bool(hardware.gpus())
    return MachineFacts(
        kernel=f"{platform.system()} {platform.release()}",
        missing=list(_find_missing()),
        open_files=0 if files == resource.RLIM_INFINITY else files,
        memory=use.memory_total if use is not None else 0,
        outgoing_ports=" ".join(_read("/proc/sys/net/ipv4/ip_local_port_range").split()),
        reserved_ports=_read("/proc/sys/net/ipv4/ip_local_reserved_ports").strip(),
        driver=_ask_driver() if has_gpus else "",
        tensorflow_gpus=_count_gpus() if has_gpus else None,
    )


def _find_missing() -> Iterator[str]:
    """Yields the names of features that do not work here."""
    for name, attempt in ATTEMPTS.items():
        try:
            attempt()
        except (OSError, AttributeError):
            yield name


def _open_pidfd() -> None:
    descriptor = kernel.open_pidfd(os.getpid())
    if descriptor is None:
        raise OSError("the system has no pidfds")
    os.close(descriptor)


def _watch() -> None:
    FolderWatch().close()


def _attach_filter() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        attach_filter(listener, NOBODY)


def _enter_network() -> None:
    """Enters a network of its own in a child, which ends at once."""
    child = os.fork()
    if child == 0:
        try:
            enter_own_network()
        except BaseException:  # noqa: BLE001 - the child must not return
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError("namespaces are not allowed")


def _find_memory_group() -> None:
    if kernel.LINUX and not find_file("memory", "memory.oom_control", "memory.events"):
        raise OSError("no control group counts memory")


ATTEMPTS: dict[str, Callable[[], None]] = {
    "pidfd": _open_pidfd,
    "file-events": _watch,
    "port-filter": _attach_filter,
    "namespaces": _enter_network,
    "memory-group": _find_memory_group,
}
"""By feature, a function that raises if the system does not have it."""


def _ask_driver() -> str:
    status, listing = query("driver_version")
    return listing.partition("\n")[0].strip() if status == 0 else ""


def _count_gpus() -> Optional[int]:
    """The number of GPUs that TensorFlow sees; None if it cannot be imported."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, timeout=IMPORT_S, check=True
        )
        return int(done.stdout.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as stream:
            return stream.read()
    except OSError:
        return ""
