"""`distlaunch submit`: queues a Slurm job that runs the cluster of a spec."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from launcher.errors import UsageError
from launcher.own_command import own_command
from launcher.plan.rendering import render_spec
from launcher.rundir.directory import RunDir, RunStart
from launcher.rundir.names import choose_folder, current_command, current_directory, make_run_id
from launcher.slurm.calls import SlurmError, call
from launcher.slurm.script import render_script
from launcher.sources.node_list import preview_nodes
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import SLURM
from launcher.spec.redaction import is_secret
from worker_entry.protocol.frozen import dataclass
from worker_entry.system import clock

SUBMIT_S = 60.0


@dataclass(frozen=True)
class Submitted:
    job: str
    directory: Path


def check_fits(spec: ClusterSpec) -> None:
    """Checks the parts of a spec that depend on its nodes, with placeholders for the nodes that the job asks for.

    Raises:
        UsageError: the spec does not use `nodes: slurm`, or contradicts itself.
    """
    if spec.source != SLURM:
        raise UsageError("the spec names its own nodes", hint="write `nodes: slurm` to use the nodes of a job")
    if spec.tensorboard == "keep":
        raise UsageError("`tensorboard: keep` would keep the job's nodes until its time ends", hint="use `true`")
    preview_nodes(spec)


def render(spec: ClusterSpec, run_dir: Path | None) -> str:
    """The script that `submit` would queue, with a name for its run."""
    return _render(spec, choose_folder(run_dir, make_run_id(spec.name)).absolute())


def submit(spec: ClusterSpec, run_dir: Path | None, *, checks: bool) -> Submitted:
    """Creates the run's folder and queues its job.

    Raises:
        SlurmError: Slurm rejects the job; the folder is removed.
    """
    run_id = make_run_id(spec.name)
    files = RunDir.create(choose_folder(run_dir, run_id))
    start = RunStart(
        run_id=run_id,
        name=spec.name,
        started=clock.now(),
        cwd=str(current_directory()),
        command=current_command(),
        checks=checks,
    )
    files.write_text(files.spec, render_spec(spec))
    try:
        # The record comes first: a job may start immediately.
        files.write_waiting(start)
        job = _queue(_render(spec, files.root), _find_secrets(spec))
    except SlurmError:
        files.run.unlink(missing_ok=True)
        files.spec.unlink()
        files.root.rmdir()
        raise
    files.note_job(start, job)
    return Submitted(job, files.root)


def _render(spec: ClusterSpec, directory: Path) -> str:
    command = own_command("resume", "--no-live", str(directory))
    return render_script(spec, directory, command, str(current_directory()))


def _find_secrets(spec: ClusterSpec) -> Mapping[str, str]:
    """The variables that the run's files do not contain: the job takes them from its environment."""
    environments = [spec.env, *(node.env for node in spec.nodes)]
    return {name: value for env in environments for name, value in env.items() if is_secret(name, value)}


def _queue(script: str, secrets: Mapping[str, str]) -> str:
    """Queues the job; returns its id."""
    answer = call(["sbatch", "--parsable"], stdin=script, environ={**os.environ, **secrets}, limit_s=SUBMIT_S)
    job = answer.strip().partition(";")[0]
    if not job.isdigit():
        raise SlurmError(f"sbatch printed no job id: {answer[:80]!r}", hint="check `squeue` before you try again")
    return job
