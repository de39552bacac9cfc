"""Reports that a program builds a cluster resolver that asks another launcher and so does not find this cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable

from worker_entry.hooks.built_strategy import watch_objects
from worker_entry.hooks.calling_line import calling_line

_PACKAGE = "tensorflow.python.distribute.cluster_resolver"
_RESOLVERS = {
    "slurm_cluster_resolver": "SlurmClusterResolver",
    "kubernetes_cluster_resolver": "KubernetesClusterResolver",
    "gce_cluster_resolver": "GCEClusterResolver",
}


def install(report: Callable[[str], None]) -> None:
    """Calls `report` each time, before such a resolver does anything: `SlurmClusterResolver at train.py:12`."""

    def report_line(name: str) -> None:
        report(f"{name} at {calling_line(2)}")

    for module, name in _RESOLVERS.items():
        watch_objects(f"{_PACKAGE}.{module}", name, before=functools.partial(report_line, name))
