"""The variables of a task that an import reads and that do not depend on the spec, and an import with them alone.

A node of a run on this machine begins that import before the run is planned. If the plan has other variables that an
import reads, the node imports again. This module must not import the models, which would delay it.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker_entry.protocol import environment
from worker_entry.protocol.orders import Preload
from worker_entry.protocol.values import Program

OF_PYTHON = {"PYTHONUNBUFFERED": "1"}
"""Output reaches the log immediately, even if the task is killed."""
OF_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "0"}
"""The log gets all of TensorFlow's messages; the console folds them."""


def share_cores(cores: int, tasks: int) -> dict[str, str]:
    """The variables that give each task of a node its share of the cores; a single task takes all by itself."""
    if tasks == 1:
        return {}
    threads = max(1, cores // tasks)
    shares = {"OMP_NUM_THREADS": threads, "TF_NUM_INTRAOP_THREADS": threads}
    # One inter-op thread can deadlock collectives.
    return {name: str(value) for name, value in {**shares, "TF_NUM_INTEROP_THREADS": max(2, threads)}.items()}


def make_early_preload(program: Program, workers: int, cores: int, variables: Mapping[str, str]) -> Preload:
    """The order to import TensorFlow for these workers of one node.

    Args:
        program: what they run.
        workers: their number.
        cores: the node's.
        variables: what the user sets.
    """
    own = {**OF_PYTHON, **OF_TENSORFLOW, **share_cores(cores, workers)}
    defaults = sorted(frozenset(environment.DEFAULTS) & own.keys() - variables.keys())
    return Preload(program, {**own, **variables}, [environment.TF_CONFIG], [], keep=False, defaults=defaults)
