"""Checks whether the imports of a kept forkserver are still the same as those of a new process.

Compares content: the files of all imported modules and loaded libraries, the list of installed packages, and other
files that imports read. A file whose size, change time and inode are unchanged has the same content; of any other file,
the content is compared. Nothing is recorded if one of the files has changed since the imports began.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from typing import Optional

from worker_entry.protocol.frozen import dataclass

JSON = ".json"
CONFIG_FILES = (os.path.join("~", ".keras", f"keras{JSON}"), os.path.join("$KERAS_HOME", f"keras{JSON}"))
"""Files that imports read in addition to modules."""
RECORDS = ("RECORD", "direct_url.json")
LIBRARY = ".so"
Identity = tuple[int, int, int, int]


@dataclass(frozen=True)
class KnownFile:
    """A file as it was imported. `digest` is empty for a native library, which is compared by its identity alone."""

    identity: Optional[Identity]
    digest: bytes


class ImportSnapshot:
    """The files that this process's imports depend on; `began` is the wall-clock time before the first import."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._files: dict[str, KnownFile] = {}
        self.problem = ""
        """Why nothing is recorded, so that no other run can use the imports; empty if everything is."""

    def record(self) -> None:
        """Records all files; takes about a third of a second for TensorFlow."""
        for path in {*_imported_files(), *_installed_files()}:
            known = _look(path)
            if known.identity is not None and known.identity[2] >= self._began * 1e9:
                self.problem = f"{path} was changed while it was imported"
                return
            self._files[path] = known

    def find_change(self) -> str:
        """The first difference between the recorded files and the present ones; empty if there is none."""
        for path in sorted(_installed_files() - self._files.keys()):
            return f"{path} is new"
        for path, known in self._files.items():
            if _identify(path) != known.identity and (not known.digest or _look(path).digest != known.digest):
                return f"{path} has changed"
        return ""


def find_foreign() -> str:
    """An imported file that belongs to no installed package, so it may be the program's own; empty if there is none."""
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    places = tuple(os.path.join(place, "") for place in (*_standard_folders(), *_site_folders()))
    own = os.path.join(ours, __name__.partition(".")[0], "")
    foreign = (path for path in _module_files() if not path.startswith(places) and not path.startswith(own))
    return min(foreign, default="")


def _look(path: str) -> KnownFile:
    identity = _identify(path)
    if identity is None:
        return KnownFile(None, b"missing")
    if LIBRARY in os.path.basename(path):
        return KnownFile(identity, b"")
    try:
        if os.path.isdir(path):
            return KnownFile(identity, hashlib.blake2b("\0".join(sorted(os.listdir(path))).encode()).digest())
        with open(path, "rb", buffering=0) as stream:
            return KnownFile(identity, hashlib.blake2b(stream.read()).digest())
    except OSError:
        return KnownFile(identity, b"unreadable")


def _identify(path: str) -> Optional[Identity]:
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_ctime_ns, facts.st_size


def _imported_files() -> Iterator[str]:
    yield from _module_files()
    yield sys.executable
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as stream:
        for line in stream:
            path = line.rstrip("\n").partition("/")[2]
            if LIBRARY in path and not path.endswith(" (deleted)"):
                yield f"/{path}"


def _module_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and os.path.isabs(path):
            yield path


def _installed_files() -> set[str]:
    """Files and folders that show which packages are installed, and other files that imports read."""
    found = set(map(os.path.expanduser, map(os.path.expandvars, CONFIG_FILES)))
    found.add(os.path.join(sys.prefix, "pyvenv.cfg"))
    for folder in _site_folders():
        found.add(folder)
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if name.endswith((".dist-info", ".egg-info")):
                    found.update(os.path.join(path, record) for record in RECORDS)
                elif name.endswith((".pth", ".egg-link")):
                    found.add(path)
    return found


def _standard_folders() -> list[str]:
    return [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]


def _site_folders() -> list[str]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    folders += [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys(folders))
