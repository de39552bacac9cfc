"""Reports a program that builds a cluster resolver which asks another launcher: it does not find this cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from worker_entry.hooks.calling_line import calling_line
from worker_entry.hooks.import_hooks import after_import

_PACKAGE = "tensorflow.python.distribute.cluster_resolver"
_RESOLVERS = {
    "slurm_cluster_resolver": "SlurmClusterResolver",
    "kubernetes_cluster_resolver": "KubernetesClusterResolver",
    "gce_cluster_resolver": "GCEClusterResolver",
}


def install(report: Callable[[str], None]) -> None:
    """Calls `report` each time, before such a resolver does anything: `SlurmClusterResolver at train.py:12`."""
    for module, name in _RESOLVERS.items():
        after_import(f"{_PACKAGE}.{module}", functools.partial(_watch, name, report))


def _watch(name: str, report: Callable[[str], None], module: ModuleType) -> None:
    resolver = getattr(module, name, None)
    if resolver is None:
        return
    original = resolver.__init__

    @functools.wraps(original)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        report(f"{name} at {calling_line()}")
        original(self, *args, **kwargs)

    resolver.__init__ = initialize
