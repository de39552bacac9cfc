"""Inspects a node before a run starts on it, without importing TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterator

from worker_entry.program.finding import find_command
from worker_entry.program.versions import installed_version
from worker_entry.protocol import environment
from worker_entry.protocol.messages import Inspected
from worker_entry.protocol.orders import Inspect
from worker_entry.protocol.speed import METHODS
from worker_entry.protocol.values import GpuUse, MachineFacts, Program
from worker_entry.system import hardware
from worker_entry.system.network import own_addresses

FILES_LIMIT = 2000
"""The maximum number of files of a module to hash."""


def inspect(order: Inspect, cwd: str, directory: str) -> Inspected:
    """Inspects the node. The program will run in `cwd`; the run's files go to `directory`."""
    import shutil

    return Inspected(
        keras=installed_version("keras"),
        gpus=list(_gpu_uses()),
        free_bytes=shutil.disk_usage(directory).free,
        directory=cwd,
        program_hash=_hash_program(order.program, cwd),
        proxies=[name for name in environment.PROXIES if os.environ.get(name)],
        problem=_leave_mark(order.shared, order.mark) if order.mark else "",
        addresses=[str(address) for address in own_addresses() if not address.is_loopback],
        machine=hardware.machine(),
        methods=[name for name in METHODS if name == "python" or installed_version(name)],
        facts=_examine() if order.examines else None,
    )


def _examine() -> MachineFacts:
    from worker_entry.system.features import examine

    return examine()


def mark_path(shared: str, mark: str) -> str:
    return os.path.join(os.path.expanduser(shared), f".distlaunch-{mark}")


def _leave_mark(shared: str, mark: str) -> str:
    try:
        os.close(os.open(mark_path(shared, mark), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        return str(error.strerror)
    return ""


def _hash_program(program: Program, cwd: str) -> str:
    import hashlib

    digest = hashlib.sha256()
    try:
        for name, path in _program_files(program, cwd):
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
            with open(path, "rb") as stream:
                while piece := stream.read(1 << 20):
                    digest.update(piece)
    except OSError:  # Prepare reports the error
        return ""
    return digest.hexdigest() if digest.digest() != hashlib.sha256().digest() else ""


def _program_files(program: Program, cwd: str) -> Iterator[tuple[str, str]]:
    """Yields the names and paths of the program's own code.

    Installed modules are compared by version instead; programs on PATH (`python`, `bash`) belong to the node and may
    differ.
    """
    if program.kind == "command":
        path = find_command(program.target, dict(os.environ), cwd) if os.sep in program.target else None
        if path is not None:
            yield "", path
        return
    if program.kind == "script":
        path = os.path.join(cwd, program.target)
        if os.path.isfile(path):
            yield "", path
        else:
            yield from _python_files(path)
        return
    top = os.path.join(cwd, program.target.partition(".")[0])
    if os.path.isfile(f"{top}.py"):
        yield "", f"{top}.py"
    else:
        yield from _python_files(top)


def _python_files(folder: str) -> Iterator[tuple[str, str]]:
    count = 0
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py") and count < FILES_LIMIT:
                count += 1
                path = os.path.join(root, name)
                yield os.path.relpath(path, folder), path


def _gpu_uses() -> Iterator[GpuUse]:
    from worker_entry.system.nvidia_smi import query

    status, listing = query("index", "memory.used", "memory.total")
    for line in listing.splitlines() if status == 0 else ():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and all(field.isdigit() for field in fields[1:]):
            yield GpuUse(fields[0], int(fields[1]), int(fields[2]))
