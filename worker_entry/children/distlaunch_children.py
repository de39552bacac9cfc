"""Waits, in a Python that a task has started, for the import of a framework; then calls `task.child_python`.

A Python that imports none of them starts as fast as before: this module only imports what Python imports on its own.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType, TracebackType
    from typing import Optional

VARIABLE = "DISTLAUNCH_CHILDREN"  # same as CHILDREN in `worker_entry.protocol.environment`, which is not imported here
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIBRARIES = ("tensorflow", "keras", "tf_keras", "jax")
PROGRESS = "worker_entry.progress"


def begin() -> Optional[Callable[[], None]]:
    """Installs the finder; returns a function to call after the user's sitecustomize, or None."""
    starter, _, order = os.environ.get(VARIABLE, "").partition(" ")
    if not order:
        return None
    sys.meta_path.insert(0, Finder(order))
    return (lambda: watch_end(order)) if os.getppid() == int(starter) else None


class Finder:
    """Waits for the first import of one of the libraries or of `PROGRESS`, and finds `worker_entry` itself."""

    def __init__(self, order: str) -> None:
        self._order = order
        self._waits = True

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name == "worker_entry":  # this package, even if another version is installed, as in the task itself
            from importlib.machinery import PathFinder

            return PathFinder.find_spec(name, [os.path.dirname(PACKAGE)])
        if not self._waits or (name not in LIBRARIES and name != PROGRESS):
            return None
        self._waits = False
        if is_ours():
            return None
        if name != PROGRESS:
            self._install()
            return self._find_elsewhere(name, path, target)
        # A program that reports its own steps, perhaps without TensorFlow.
        spec = self._find_elsewhere(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: ModuleType) -> None:
                execute(module)
                self._install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]  # made for this one spec
        return spec

    def _find_elsewhere(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType]
    ) -> Optional[ModuleSpec]:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)  # old finders do not have it
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                return spec  # type: ignore[no-any-return]
        return None

    def _install(self) -> None:
        try:
            from worker_entry.task import child_python

            child_python.install(self._order)
        except Exception:  # noqa: BLE001, S110 - the program runs without it
            pass


def watch_end(order: str) -> None:
    """Called in the task's own process: writes the exception that ends it to the task's crash record."""
    show, process = sys.excepthook, os.getpid()

    def record_and_show(kind: type[BaseException], error: BaseException, trace: Optional[TracebackType]) -> None:
        try:
            if os.getpid() == process:  # not in a child that the program has forked
                from worker_entry.task import child_python

                child_python.record(order, error)
        except Exception:  # noqa: BLE001, S110 - the program's own error must still be shown
            pass
        show(kind, error, trace)
        if issubclass(kind, KeyboardInterrupt) and "worker_entry.task.child_python" in sys.modules:
            sys.modules["worker_entry.task.child_python"].remember_interrupt(error)

    sys.excepthook = record_and_show


def is_ours() -> bool:
    """Whether this process runs worker_entry itself, for a launcher within the task: it needs no help."""
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return os.path.dirname(os.path.abspath(file)) == PACKAGE
