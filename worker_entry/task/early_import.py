"""Hides modules that were imported early until the program imports them itself.

A forked task has TensorFlow or JAX in memory before its program begins. Whatever the program does before its first
`import` must have the same effect as in plain Python: setting a variable, extending `sys.path`, configuring logging. So
these modules are hidden from the program. When the program imports one of them, the variables that the import reads are
compared with their values at the early import, and the file that `sys.path` leads to now with the module's file. If
nothing differs, the module and everything that it imported become visible at once. Otherwise, the task starts again as
plain Python without early imports; the framework has not run anything by then.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.machinery
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Optional

from worker_entry.hooks.import_hooks import run_hooks
from worker_entry.program.import_variables import LATE
from worker_entry.task.import_effects import Effects, HiddenLoggers, State, noted_exit_handlers, undo

TENSORFLOW = "tensorflow"
NUMPY = "numpy"
_XLA = ("TF_", "XLA_", "TPU_", "CUDA_", "NVIDIA_", "ROCM_", "HIP_", "GRPC_", "ABSL_", "OMP_", "LD_", "MALLOC_")
NATIVE_READS = {
    NUMPY: ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_", "LD_", "MALLOC_"),
    TENSORFLOW: (*_XLA, "AUTOGRAPH_", "ONEDNN_", "DNNL_", "MIOPEN_", "GLOG_", "HDF5_", "TCMALLOC_", "KMP_"),
    "jaxlib": (*_XLA, "LIBTPU_", "PJRT_", "DNNL_"),
    "h5py": ("HDF5_",),
}
"""Prefixes of variables that a package's native libraries read: such reads cannot be recorded."""
_LOGGING = "tensorflow.python.platform.tf_logging"
Difference = str
"""How an early import differs from the program's own import, as a clause."""
OURS = __name__.partition(".")[0]


class EarlyImport:
    """The modules that a process imports for the tasks that are forked from it."""

    def __init__(self) -> None:
        self._before = set(sys.modules)
        self._environ = dict(os.environ)
        self._imports: dict[str, set[str]] = {}
        """The packages that each package imports."""
        self._reads: dict[str, set[str]] = {}
        """The variables that each package reads while it is imported."""
        self._effects: dict[str, Effects] = {}
        self._state = State()
        self._known_loggers = set(logging.root.manager.loggerDict)
        self._loggers: Optional[HiddenLoggers] = None
        self._import_hooks: list[Any] = []
        self._modules: dict[str, dict[str, ModuleType]] = {}
        """The modules that are to be hidden, by the installed package to which they belong, then by name."""
        self._hidden: dict[str, dict[str, ModuleType]] = {}

    def load(self, name: str) -> None:
        """Imports the module and records what the import depends on; raises any exception of the import."""
        if top_package(name) in self._effects:
            return
        before = State()
        with noted_exit_handlers() as noted, self._recording():
            importlib.import_module(name)
        standard = _standard_folders()
        at_exit = [handler for module, handler in noted if _is_installed(top_package(module), standard)]
        self._effects[top_package(name)] = Effects.since(before, at_exit)

    @property
    def reads(self) -> list[str]:
        """The variables that these imports have read."""
        return sorted(set().union(*self._reads.values()))

    def find_modules(self) -> None:
        """Finds the modules to hide; called after the last import and before a fork, so that no task needs to."""
        standard, found = _standard_folders(), dict[str, dict[str, ModuleType]]()
        for name, module in sys.modules.items():
            if name not in self._before:
                found.setdefault(top_package(name), {})[name] = module
        found.pop(OURS, None)
        self._modules = {package: modules for package, modules in found.items() if _is_installed(package, standard)}

    def hide(self, start_again: Callable[[Difference], None]) -> None:
        """Hides the modules; called in a task before its program begins.

        Args:
            start_again: called when the program's own import would differ; it does not return.
        """
        self._hidden = dict(self._modules)
        for modules in self._hidden.values():
            for name in modules:
                del sys.modules[name]
        undo(self._state, self._effects.values())
        _forget_logger(self._find(_LOGGING))
        self._loggers = HiddenLoggers.hide(self._known_loggers)
        self._import_hooks = _find_import_hooks()
        sys.meta_path.insert(0, _Finder(self, start_again))

    # --- while modules are imported ---

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        plain, environ = builtins.__import__, type(os.environ)

        def note_import(name: str, *rest: Any, **named: Any) -> ModuleType:
            variables, level = rest[0] if rest else None, named.get("level", rest[3] if len(rest) > 3 else 0)
            if level == 0 and variables:
                self._imports.setdefault(top_package(variables.get("__name__") or ""), set()).add(top_package(name))
            return plain(name, *rest, **named)

        builtins.__import__ = note_import
        os.environ.__class__ = make_recording_environ(environ, self._reads)
        try:
            yield
        finally:
            os.environ.__class__ = environ
            builtins.__import__ = plain

    # --- in a task ---

    def spec_of(self, name: str, finder: _Finder) -> Optional[importlib.machinery.ModuleSpec]:
        """The spec for a hidden module; None for others."""
        module = self._find(name)
        if module is None:
            return None
        plain = module.__spec__
        loader: Any = _Loader(module, finder)  # importlib needs no base class
        spec = importlib.machinery.ModuleSpec(name, loader, origin=None if plain is None else plain.origin)
        if hasattr(module, "__path__"):
            spec.submodule_search_locations = list(module.__path__)
        spec.has_location = plain is not None and plain.has_location
        return spec

    def find_difference(self, name: str) -> Optional[Difference]:
        """How the program's own import of this package would differ; None if it would not."""
        packages = self._needed(name)
        reads = {variable for package in packages for variable in self._reads.get(package, ())}
        native = tuple(start for package in packages for start in NATIVE_READS.get(package, ()))
        for variable in sorted(self._environ.keys() | os.environ.keys()):
            known = variable in reads or variable.startswith(native)
            if known and variable not in LATE and self._environ.get(variable) != os.environ.get(variable):
                return f"the program sets {variable} before it imports {name}"
        hidden = [package for package in self._hidden if package in packages]
        for package in hidden:
            for module_name, module in self._hidden[package].items():
                if sys.modules.get(module_name, module) is not module:
                    return f"the program puts its own {module_name} into sys.modules before it imports {name}"
        if _find_import_hooks() != self._import_hooks:
            return f"the program changes how modules are imported before it imports {name}"
        for package in sorted(hidden):
            there = importlib.machinery.PathFinder.find_spec(package)
            here = self._hidden[package][package].__spec__
            if there is not None and there.origin is not None and here is not None and there.origin != here.origin:
                return f"sys.path now leads to another {package}: {there.origin}"
        return None

    def show(self, name: str, *, all_needed: bool) -> None:
        """Makes the package visible; with `all_needed`, also everything that it has imported."""
        packages = self._needed(name) if all_needed else {top_package(name)}
        shown: dict[str, ModuleType] = {}
        for package in [package for package in self._hidden if package in packages]:
            shown.update(self._hidden.pop(package))
        for module in shown:
            sys.modules.setdefault(module, shown[module])
        assert self._loggers is not None  # they were hidden with the modules
        self._loggers.show_all_except(self._hidden)
        for package in [package for package in self._effects if package in shown]:
            self._effects[package].repeat()
            self._environ.update(self._effects[package].environ)
        if _LOGGING in shown:
            shown[_LOGGING].__dict__["get_logger"]()  # recreates the logger with the program's logging configuration
        run_hooks(shown)

    def is_ours(self, name: str) -> bool:
        """Whether the module belongs to a package that was imported early."""
        return top_package(name) in self._modules

    def _find(self, name: str) -> Optional[ModuleType]:
        """The hidden module of this name; None if it is not hidden."""
        return self._hidden.get(top_package(name), {}).get(name)

    def _needed(self, name: str) -> set[str]:
        """The module's package and all packages that it imports, directly or indirectly."""
        needed, queue = set[str](), [top_package(name)]
        while queue:
            package = queue.pop()
            if package in self._modules and package not in needed:
                needed.add(package)
                queue += self._imports.get(package, ())
        return needed


class _Finder:
    """The meta path finder that makes hidden modules visible."""

    def __init__(self, early: EarlyImport, start_again: Callable[[Difference], None]) -> None:
        self._early = early
        self._start_again = start_again

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        return self._early.spec_of(name, self)

    def load(self, name: str) -> None:
        importer = _importer()
        if self._early.is_ours(importer):  # in plain Python, the importer would have imported this module
            self._early.show(name, all_needed=False)
            return
        difference = self._early.find_difference(top_package(name))
        if difference is not None:
            self._start_again(difference)
        self._early.show(name, all_needed=True)


class _Loader:
    """A loader that returns a module that is already loaded."""

    def __init__(self, module: ModuleType, finder: _Finder) -> None:
        self._module = module
        self._spec = module.__spec__
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has replaced it with the finder's spec
        self._finder.load(module.__name__)


def _find_import_hooks() -> list[Any]:
    """The functions and hooks that decide how modules are imported, without those of this package."""
    hooks = [builtins.__import__, *sys.meta_path, *sys.path_hooks]
    return [hook for hook in hooks if top_package(getattr(hook, "__module__", "")) != OURS]


def _standard_folders() -> tuple[str, ...]:
    return tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


def _is_installed(package: str, standard: tuple[str, ...]) -> bool:
    """Whether the package is installed, not part of Python."""
    spec = getattr(sys.modules.get(package), "__spec__", None)
    if spec is None:
        return False
    if spec.origin is None:
        return spec.submodule_search_locations is not None  # a namespace package
    own = spec.origin.startswith(standard) and not any(f"{os.sep}{name}" in spec.origin for name in _PACKAGES)
    return spec.has_location and not own


_PACKAGES = ("site-packages", "dist-packages")


def _forget_logger(module: Optional[ModuleType]) -> None:
    """Resets TensorFlow's logger: on creation, it gets a handler unless the program has already configured logging."""
    if module is not None and getattr(module, "_logger", None) is not None and hasattr(module, "get_logger"):
        module.__dict__["_logger"] = None
        logging.getLogger("tensorflow").handlers.clear()


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
