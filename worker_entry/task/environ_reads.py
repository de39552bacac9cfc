"""Records the environment variables that an import reads."""

from __future__ import annotations

import sys
from typing import Any

OURS = __name__.partition(".")[0]


def make_recording_environ(environ: type[Any], reads: dict[str, set[str]]) -> type[Any]:
    copied = [0]

    class Recording(environ):  # type: ignore[misc]  # its base is only known at run time
        """Records which package reads which variable; copying the whole environment does not count."""

        def __getitem__(self, name: Any) -> Any:
            if copied[0] > 0:
                copied[0] -= 1
            elif isinstance(name, str):
                reads.setdefault(top_package(_importing()), set()).add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            if isinstance(name, str):
                reads.setdefault(top_package(_importing()), set()).add(name)
            return bool(super().__contains__(name))

        def keys(self) -> Any:  # `dict(os.environ)` calls it first
            copied[0] = len(self)
            return super().keys()

        def copy(self) -> Any:
            copied[0] = len(self)
            return super().copy()

    return Recording


def _importing() -> str:
    """The name of the module that is being imported."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not (frame.f_code.co_name == "<module>" and "__name__" in frame.f_globals):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _importer() -> str:
    """The name of the module whose code contains the import."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(("importlib", f"{OURS}.")) or name.startswith(f"{OURS}.demo"):
            return name
        frame = frame.f_back
    return "__main__"


def top_package(name: str) -> str:
    """`tensorflow.python.ops` → `tensorflow`."""
    return name.partition(".")[0]
