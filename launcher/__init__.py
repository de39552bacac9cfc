"""The Python interface of distlaunch, and its controller.

>>> from launcher import run_local
>>> report = run_local("train.py", "--epochs", "3", workers=2)
>>> assert report.outcome == "succeeded", report.verdict

A run goes through the folders in this order: `spec` (the user's request), `plan` (the settings of each task), `gang`
(the life of the cluster), `verdict` (the cause of its end), `report` (the results). `run` drives these steps over
`transports` and shows them on the `console`; `commands` act on nodes and runs outside of a run; `python` is the
interface for Python programs, and `cli` is the command line.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing `typing` takes several milliseconds, in which Ctrl-C would show a traceback
if TYPE_CHECKING:
    from typing import Any

    from launcher.errors import DistlaunchError
    from launcher.python.calls import run, run_local
    from launcher.python.cluster import Cluster
    from launcher.python.specs import load_spec, local_spec
    from launcher.report.models import RunReport
    from launcher.spec.models import ClusterSpec

__all__ = ["Cluster", "ClusterSpec", "DistlaunchError", "RunReport", "load_spec", "local_spec", "run", "run_local"]

_PLACES = {
    "Cluster": "launcher.python.cluster",
    "ClusterSpec": "launcher.spec.models",
    "DistlaunchError": "launcher.errors",
    "RunReport": "launcher.report.models",
    "load_spec": "launcher.python.specs",
    "local_spec": "launcher.python.specs",
    "run": "launcher.python.calls",
    "run_local": "launcher.python.calls",
}
"""The modules of the public names; imported at first use, because `import launcher` and `--help` need none of them."""


def find(name: str) -> Any:
    """The object with this name in the Python interface."""
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __getattr__(name: str) -> Any:
    if name == "run":  # also a subpackage, which takes over the name once imported
        from importlib import import_module

        return import_module("launcher.run")
    if name in _PLACES:
        return find(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
