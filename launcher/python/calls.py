"""Whole runs in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from launcher.python.cluster import Cluster
from launcher.python.specs import local_spec
from launcher.report.models import RunReport
from launcher.spec.models import ClusterSpec
from worker_entry.protocol.strategy_names import StrategyName


def run(
    spec: ClusterSpec | str | os.PathLike[str],
    *,
    run_dir: str | os.PathLike[str] | None = None,
    checks: bool = True,
    timeout_s: float | None = None,
) -> RunReport:
    """Runs a cluster to its end, as `distlaunch up` does, but prints nothing.

    Args:
        spec: a spec, or the path of a spec file.
        run_dir: a new folder for the run's files; by default, a folder in the user's state directory.
        checks: whether to check the nodes before the start.
        timeout_s: stops the run after this many seconds.

    Raises:
        DistlaunchError: the run could not be started; no process is left running.
        TimeoutError: the run was stopped after `timeout_s`.

    >>> report = run("cluster.yaml")
    >>> report.outcome, report.verdict.reference, report.verdict.task
    ('failed', 'task-failed', 'worker:1')
    """
    with Cluster(spec, run_dir=run_dir, checks=checks) as cluster:
        return cluster.wait(timeout_s)


def run_local(
    script: str | os.PathLike[str] | None = None,
    *args: str,
    module: str | None = None,
    command: Sequence[str] | None = None,
    workers: int | None = None,
    strategy: StrategyName = "multi_worker_mirrored",
    env: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    run_dir: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
) -> RunReport:
    """Runs a program on a cluster on this machine to its end, as `distlaunch local` does, but prints nothing.

    `local_spec` explains the arguments up to `settings` and has more of them; `run` explains the last two arguments and
    the exceptions.

    >>> report = run_local("train.py", "--epochs", "3", workers=2)
    >>> assert report.outcome == "succeeded", report.verdict
    """
    spec = local_spec(
        script,
        *args,
        module=module,
        command=command,
        workers=workers,
        strategy=strategy,
        env=env,
        settings=settings,
    )
    return run(spec, run_dir=run_dir, checks=False, timeout_s=timeout_s)
