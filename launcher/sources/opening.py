"""Chooses the source of a run's nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from launcher.sources.base import NodeSource
from launcher.sources.kubernetes import opened_pods
from launcher.sources.slurm import find_slurm_job
from launcher.spec.models import ClusterSpec
from launcher.spec.pods import PodsSpec


@contextlib.contextmanager
def opened_source(
    spec: ClusterSpec,
    *,
    run_id: str,
    cwd: str,
    connectors: Callable[[], Iterable[object]],
    warn: Callable[[str], None],
) -> Iterator[NodeSource]:
    """Yields the source of the spec's nodes; at the end, removes what it has created for the run.

    Args:
        spec: the spec.
        run_id: the run.
        cwd: where the user started it.
        connectors: returns the current connectors to the nodes.
        warn: gets messages for the user.

    Raises:
        UsageError: the pod template cannot be read.
    """
    if isinstance(spec.source, PodsSpec):
        with opened_pods(spec, spec.source, run_id=run_id, cwd=cwd, warn=warn) as pods:
            yield pods
    else:
        yield find_slurm_job(spec, connectors) or NodeSource()
