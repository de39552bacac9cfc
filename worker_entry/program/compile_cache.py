"""Persistent caches of compiled code: one private folder for each version and kind of machine.

XLA loads compiled code without checking the version and the processor for which it was compiled, so the folder's name
contains both. The code in a cache is executed, so a folder that others can access is refused.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import stat
from typing import BinaryIO

from worker_entry.program.versions import installed_version
from worker_entry.protocol import environment
from worker_entry.system.ownership import verify_private

XLA_FLAGS = "TF_XLA_FLAGS"
XLA_DIRECTORY = "--tf_xla_persistent_cache_directory"
ENTRY = ".pb"
"""The suffix of the names of entries in XLA's cache."""
GRAPHS = "inductor/fxgraph"
"""The folder of the graphs that `torch.compile` has compiled, in Inductor's cache."""
UNKNOWN = (None, "unknown")
"""Versions that cannot name a folder."""
_PROCESSOR = re.compile(r"(vendor_id|cpu family|model|model name|stepping|flags|Features|CPU \w+)\s*:")
"""Lines of /proc/cpuinfo that identify the processor's instructions."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def add_compile_cache(env: dict[str, str]) -> None:
    """Adds the libraries' cache variables if the environment names a cache folder; keeps the user's own values.

    Raises:
        OSError: a folder cannot be created, or is not private.
    """
    if environment.CACHE not in env:
        return
    import hashlib  # here: each agent imports this module, and few runs have a cache

    root = os.path.expanduser(env[environment.CACHE])
    os.makedirs(root, mode=0o700, exist_ok=True)
    # With PYTHONPATH, a program may import another version than the version found here.
    seen = f"{env.get('PYTHONPATH', '')}\n{_describe_machine()}".encode(errors="surrogateescape")
    kind = f"{hashlib.sha256(seen).hexdigest()[:12]}-{os.geteuid()}"
    tensorflow, torch = installed_version("tensorflow"), installed_version("torch")
    flags = env.get(XLA_FLAGS, "")
    # A value that does not begin with a dash names a file with flags.
    if tensorflow not in UNKNOWN and XLA_DIRECTORY not in flags and flags.strip()[:1] in ("", "-"):
        folder = _make_private(os.path.join(root, f"tensorflow-{tensorflow}-{kind}"))
        _remove_incomplete(folder)
        env[XLA_FLAGS] = f"{flags} {XLA_DIRECTORY}={folder}".strip()
    if torch not in UNKNOWN:
        folder = _make_private(os.path.join(root, f"torch-{torch}-{kind}"))
        os.makedirs(os.path.join(folder, GRAPHS), mode=0o700, exist_ok=True)  # here already, so that it can be watched
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, os.path.dirname(GRAPHS)))
        env.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))


def find_folders(root: str) -> list[str]:
    """Returns the folders in which this user's entries are or may come, for all versions, below a cache's folder."""
    below, user = glob.escape(os.path.expanduser(root)), os.geteuid()
    patterns = [f"tensorflow-*-{user}", *(f"torch-*-{user}/{GRAPHS}{deeper}" for deeper in ("", "/*", "/*/*"))]
    return [folder for pattern in patterns for folder in glob.glob(os.path.join(below, pattern))]


def find_entries(path: str) -> list[str]:
    """Returns the entries that a file or folder in one of `find_folders` belongs to, or contains.

    XLA's entry is a file. Inductor's is a folder with a file for each way to use the graph, two levels below GRAPHS.
    """
    top, separator, below = path.partition(f"/{GRAPHS}/")
    if not separator:
        return [path] if path.endswith(ENTRY) else []
    if "/" not in below:
        return glob.glob(os.path.join(glob.escape(path), "*"))
    return [f"{top}{separator}{'/'.join(below.split('/')[:2])}"]


def _make_private(folder: str) -> str:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    try:
        is_open = os.lstat(verify_private(folder)).st_mode & _OTHERS
        reason = "others can read it" if is_open else ""
    except OSError as error:
        reason = error.strerror or ""
    if reason:
        text = f"this compile cache is not a private folder of yours ({reason}); choose another"
        raise OSError(errno.EPERM, text, folder)
    return folder


def _describe_machine() -> str:
    """Describes the parts on which compiled code depends: the processor, and the GPUs with their driver."""
    lines = [os.uname().machine]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        first = file.read().partition("\n\n")[0]
        lines += filter(_PROCESSOR.match, first.splitlines())
    for path in ["/proc/driver/nvidia/version", *sorted(glob.glob("/proc/driver/nvidia/gpus/*/information"))]:
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            lines += [line for line in file if line.startswith(("NVRM", "Model:"))]
    return "\n".join(lines)


def _remove_incomplete(folder: str) -> None:
    """Removes truncated entries, as after a power loss: each of them would fail every run that loads it."""
    for path in glob.glob(os.path.join(glob.escape(folder), f"*{ENTRY}")):
        with contextlib.suppress(OSError):
            with open(path, "rb") as file:
                is_whole = _is_whole(file)
            if not is_whole:
                os.unlink(path)


def _is_whole(file: BinaryIO) -> bool:
    """Whether the fields of a protocol buffer end exactly at the file's end; reads only their lengths."""
    size, place = os.fstat(file.fileno()).st_size, 0
    while place < size:
        file.seek(place)
        head = file.read(20)
        kind, used = _varint(head, 0)
        if kind & 7 != 2:  # the fields of an entry are only strings and messages
            return False
        length, used = _varint(head, used)
        place += used + length
    return place == size > 0


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns the number at this place, and the place after the number."""
    value = 0
    for number, byte in enumerate(data[place : place + 10]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, place + number + 1
    return 0, place + 10
