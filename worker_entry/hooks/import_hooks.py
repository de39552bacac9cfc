"""Runs callbacks when the program imports a module, without importing the module earlier."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Optional

Context = Callable[[], contextlib.AbstractContextManager[None]]


def after_import(name: str, then: Callable[[ModuleType], None], *, before: Optional[Callable[[], None]] = None) -> None:
    """Calls `then` with the module after its import, or now if it is imported already; `then` must not raise.

    `before` is called when the import begins, if it has not begun yet.
    """
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then, before))


def import_within(name: str, context: Context) -> None:
    """Runs the module's import within the context, unless it is imported already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Finder(name, lambda _: None, None, context))


def run_hooks(names: Collection[str]) -> None:
    """Runs the callbacks for these modules, which were imported without this module's finders."""
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder) and finder.name in names]:
        sys.meta_path.remove(finder)
        finder.run(sys.modules[finder.name])


class _Finder:
    """A meta path finder that finds one module."""

    def __init__(
        self,
        name: str,
        then: Callable[[ModuleType], None],
        before: Optional[Callable[[], None]],
        context: Context = contextlib.nullcontext,
    ) -> None:
        self.name = name
        self._before = before
        self._then = then
        self._context = context

    def run(self, module: ModuleType) -> None:
        """Runs the callbacks for a module that is imported already."""
        if self._before is not None:
            self._before()
        self._then(module)

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != self.name:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else sys.meta_path
        found = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_go_on(module: ModuleType) -> None:
            # Not earlier: a program may ask for the spec only to check whether the module exists.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            if self._before is not None:
                self._before()
            with self._context():
                execute(module)
            self._then(module)

        # The loader was made for this spec only, so the change affects no other import.
        spec.loader.exec_module = execute_and_go_on  # type: ignore[method-assign]
        return spec
