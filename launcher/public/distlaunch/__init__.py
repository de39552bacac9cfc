"""Multi-worker clusters for TensorFlow and Keras, from a program, a test or a notebook.

>>> from distlaunch import run_local
>>> report = run_local("train.py", "--epochs", "3", workers=2)
>>> assert report.outcome == "succeeded", report.verdict

`Cluster` starts a run that lasts at most as long as a `with` block; `run` and `run_local` run a cluster to its end.
In a notebook, a running cluster shows its tasks, and a report draws itself.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing `typing` takes several milliseconds
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
"""The modules of the names; imported at first use, because `import distlaunch` needs none of them."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
