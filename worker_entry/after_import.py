"""Does something to a module as soon as the program has imported it, and not before."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Optional


def after_import(name: str, then: Callable[[ModuleType], None], *, before: Optional[Callable[[], None]] = None) -> None:
    """Calls `then` with the module when it has been imported, or now if it has been; it must not raise.

    `before` is called when the import begins, if it has not yet.
    """
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then, before))


class _Finder:
    """A meta path finder that finds one module."""

    def __init__(self, name: str, then: Callable[[ModuleType], None], before: Optional[Callable[[], None]]) -> None:
        self._name = name
        self._before = before
        self._then = then

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_go_on(module: ModuleType) -> None:
            # Not before: a program may ask for the spec only to see whether there is such a module.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            if self._before is not None:
                self._before()
            execute(module)
            self._then(module)

        # The loader was made for this one spec, so that the change ends with it.
        spec.loader.exec_module = execute_and_go_on  # type: ignore[method-assign]
        return spec
