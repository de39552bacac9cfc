"""The first process of an exported pod: the archive that holds it, the program's folder, and its command line."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping

from launcher.errors import UsageError
from worker_entry.protocol.frozen import dataclass

FOLDER = "/distlaunch"
"""Where pods find the files of their ConfigMap."""
ENTRY, PROGRAM = "entry.pyz", "folder.zip"
LIMIT = 1 << 20
"""Bytes of all files of a ConfigMap together, before they become base64."""

_MAIN = """\
import sys, tempfile, zipfile
if sys.version_info < (3, 9):
    sys.exit("distlaunch: %s is Python %d.%d; it needs 3.9 or newer" % ((sys.executable,) + sys.version_info[:2]))
archive, sys.path[0] = sys.path[0], tempfile.mkdtemp(prefix="distlaunch-")
with zipfile.ZipFile(archive) as bundle:
    bundle.extractall(sys.path[0])
from worker_entry.__main__ import main
main()
"""
"""The archive unpacks itself: Python processes that a program starts find our files by their paths."""


@dataclass(frozen=True)
class PackedFile:
    """A file as it goes into an archive."""

    path: str
    data: bytes = b""
    executable: bool = False


def pack(files: Iterable[PackedFile]) -> bytes:
    """A zip of these files: the same bytes for the same files."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as bundle:
        for file in files:
            entry = zipfile.ZipInfo(file.path, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if file.executable else 0o644) << 16
            bundle.writestr(entry, file.data)
    return target.getvalue()


def make_entry(sources: Iterable[PackedFile]) -> bytes:
    """The archive that a pod's Python runs.

    Args:
        sources: the files of `worker_entry`.
    """
    return pack([PackedFile("__main__.py", _MAIN.encode()), *sources])


def check_size(files: Mapping[str, bytes]) -> None:
    """Checks that the files fit into a ConfigMap.

    Raises:
        UsageError: they do not fit.
    """
    size = sum(map(len, files.values()))
    if size > LIMIT:
        raise too_large(f"{size:,} bytes, compressed, with distlaunch's own")


def too_large(size: str) -> UsageError:
    """The error for a folder of this size."""
    return UsageError(
        f"sync.path: the program's folder is too large for a ConfigMap, which holds 1 MiB: {size}",
        hint="exclude files with `sync.exclude`, or remove `sync:` and bring the program by --image or --volume",
    )
